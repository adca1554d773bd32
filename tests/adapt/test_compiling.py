"""Compiled regions: one graph for all layers and lengths, full graphs, the eager decoder's results."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import _dynamo as dynamo
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from trimtab.adapt import (
    LoraSettings,
    QuantizedLinear,
    Regions,
    add_adapters,
    compilations,
    compile_regions,
    init_adapters,
    quantize_layout,
)
from trimtab.adapt import recompute as recompute_policies
from trimtab.adapt.compiling import source_key, use_cache_folder
from trimtab.adapt.lora import create_dropout_masks
from trimtab.facts.shapes import ModelShape, uniform_shape
from trimtab.generate.cache import KVCache
from trimtab.kernels.attention import Layout
from trimtab.model import Decoder, build, init_weights

PLAIN = uniform_shape(
    "qwen3", 64, 32, 64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=8, qk_norm=True
)
LENGTHS = (32, 40, 33, 7, 24, 56, 9, 100, 64, 2)


def recomputed(decoder: Decoder, on: bool = True) -> Decoder:
    return recompute_policies.apply(decoder, ["block" if on else "none"] * len(decoder.model.layers))


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled code and settings are global to the process; each test starts without any."""
    monkeypatch.setitem(os.environ, "TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR", ""))
    duck = torch.fx.experimental._config.use_duck_shape
    dynamo.reset()
    dynamo.utils.counters.clear()
    with dynamo.config.patch(recompile_limit=dynamo.config.recompile_limit, specialize_float=False):
        yield
    torch.fx.experimental._config.use_duck_shape = duck
    dynamo.reset()


def made(
    shape: ModelShape = PLAIN, *, attention: str = "sdpa_flash", dtype: str = "fp32", **more: Any
) -> Decoder:
    return init_weights(build(shape, dtype=dtype, device="cpu", attention=attention, **more), seed=0)


def batch(length: int, rows: int = 2) -> tuple[torch.Tensor, Layout]:
    generator = torch.Generator().manual_seed(length)
    documents_BT = torch.randint(0, 4, (rows, length), generator=generator).sort(1).values
    return torch.randint(0, 64, (rows, length), generator=generator), Layout.packed(documents_BT)


def trained(decoder: Decoder, ids_BT: torch.Tensor, layout: Layout | None) -> list[torch.Tensor]:
    """The loss and every gradient."""
    decoder.zero_grad()
    loss = decoder.loss(ids_BT, ids_BT.roll(-1, 1), None, layout, reduction="mean")
    loss.backward()
    return [loss.detach(), *(p.grad for p in decoder.parameters() if p.grad is not None)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("attention", ["reference", "sdpa_flash", "sdpa_math"])
def test_one_graph_for_all_layers_and_lengths(attention: str, packed: bool) -> None:
    plain, compiled = (
        made(attention=attention),
        compile_regions(made(attention=attention), backend="aot_eager"),
    )
    for length in LENGTHS:
        ids_BT, layout = batch(length)
        layout = layout if packed else Layout.causal()
        for got, want in zip(trained(compiled, ids_BT, layout), trained(plain, ids_BT, layout), strict=True):
            torch.testing.assert_close(got, want)
    # Masks have rows padded to 8 elements: those that need no padding have other strides.
    assert compilations()[0] == (2 if packed else 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policies", "tiles", "programs"),
    [
        (["none", "pointwise", "selective", "block"], 1, 4),
        # The half before the tiles; the tiles without gradients, and with.
        (["block", "block", "none", "offload"], 2, 3),
    ],
)
def test_each_policy_is_a_separate_graph(policies: list[str], tiles: int, programs: int) -> None:
    plain, compiled = made(), made()
    compile_regions(recompute_policies.apply(compiled, policies, mlp_tiles=tiles), backend="aot_eager")
    for length in (16, 24):
        ids_BT, layout = batch(length)
        for got, want in zip(trained(compiled, ids_BT, layout), trained(plain, ids_BT, layout), strict=True):
            torch.testing.assert_close(got, want)
    assert compilations()[0] == programs


def test_each_attention_window_is_a_separate_graph() -> None:
    shape = uniform_shape(
        "mistral", 64, 32, 64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, sliding_window=9
    )
    assert shape.window(0) == 9
    plain, compiled = made(shape), compile_regions(made(shape), backend="aot_eager")
    for length in (16, 24, 40):
        ids_BT, layout = batch(length)
        for got, want in zip(trained(compiled, ids_BT, layout), trained(plain, ids_BT, layout), strict=True):
            torch.testing.assert_close(got, want)
    assert compilations()[0] == 1


def test_frozen_embeddings_do_not_recompile_the_first_block() -> None:
    plain, compiled = made(), made()
    for decoder in (plain, compiled):
        decoder.model.embed_tokens.requires_grad_(False)
    compile_regions(compiled, backend="aot_eager")
    ids_BT, layout = batch(16)
    for got, want in zip(trained(compiled, ids_BT, layout), trained(plain, ids_BT, layout), strict=True):
        torch.testing.assert_close(got, want)
    assert compilations()[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nf4", None])
@pytest.mark.parametrize("settings", [{"lora_dropout": 0.25}, {"use_dora": True}], ids=str)
def test_adapters_and_quantized_weights_share_one_graph(kind: str | None, settings: dict[str, Any]) -> None:
    shape = replace(PLAIN, hidden_size=64)
    decoder = made(shape)
    if kind is not None:
        weights = {name: p.detach().clone() for name, p in decoder.named_parameters()}
        quantize_layout(decoder, kind).to_empty(device="cpu")
        with torch.no_grad():
            for name, module in decoder.named_modules():
                if isinstance(module, QuantizedLinear):
                    module.set_weight(weights[f"{name}.weight"])
            for name, parameter in decoder.named_parameters():
                if name in weights:
                    parameter.copy_(weights[name])
    add_adapters(decoder, LoraSettings(r=4, **settings))
    init_adapters(decoder, seed=0)
    for name, parameter in decoder.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    create_dropout_masks(decoder, torch.device("cpu"))
    recomputed(decoder)
    compile_regions(decoder, backend="aot_eager")
    for length in (16, 24):
        ids_BT, layout = batch(length)
        with Regions(decoder).paused():
            want = trained(decoder, ids_BT, layout)
        for got, one in zip(trained(decoder, ids_BT, layout), want, strict=True):
            torch.testing.assert_close(got, one)
    assert compilations()[0] == 1


def test_evaluation_and_generation_compile_nothing() -> None:
    compiled = compile_regions(made(), backend="aot_eager")
    ids_BT, layout = batch(16)
    with torch.no_grad():
        compiled.loss(ids_BT, ids_BT, None, layout)
        cache = KVCache(PLAIN.num_layers)
        compiled(ids_BT, cache=cache)
        compiled(ids_BT[:, :1], cache=cache)
    assert compilations()[0] == 0


def test_a_graph_break_raises() -> None:
    decoder = made()

    def look(module: Any, args: tuple[torch.Tensor, ...]) -> None:
        print(float(args[0].sum()))

    decoder.model.layers[0].mlp.register_forward_pre_hook(look)
    compile_regions(decoder, backend="aot_eager")
    ids_BT, layout = batch(16)
    with pytest.raises(dynamo.exc.TorchDynamoException):
        trained(decoder, ids_BT, layout)


@pytest.mark.parametrize("tiles", [1, 2])
def test_hooks_run_in_paused_regions(tiles: int) -> None:
    decoder, seen = made(), []
    compile_regions(recompute_policies.apply(decoder, ["none"] * 4, mlp_tiles=tiles), backend="aot_eager")
    decoder.model.layers[0].mlp.register_forward_pre_hook(
        lambda _, args: seen.append(float(args[0].detach().sum()))
    )
    ids_BT, layout = batch(16)
    with Regions(decoder).paused():
        trained(decoder, ids_BT, layout)
    assert len(seen) == (1 if tiles == 1 else 2 * tiles), "each tile is recomputed"
    assert decoder.regions is not None


def test_no_name_changes() -> None:
    decoder = compile_regions(made(), backend="aot_eager")
    assert [name for name, _ in decoder.named_parameters()] == [name for name, _ in PLAIN.parameters()]
    assert decoder.state_dict().keys() == made().state_dict().keys()


def test_autocast_masks_have_the_queries_dtype() -> None:
    plain, compiled = made(), compile_regions(made(), backend="aot_eager")
    ids_BT, layout = batch(24)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for got, want in zip(trained(compiled, ids_BT, layout), trained(plain, ids_BT, layout), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.slow
def test_triton_kernels_are_in_the_graph() -> None:
    pytest.importorskip("triton")
    from tests.kernels.triton_tools import interpreted
    from trimtab.kernels import partial_sums
    from trimtab.kernels.attention import kernels_backward, kernels_forward, launch_triton
    from trimtab.kernels.gated_mlp import impl_triton as gated
    from trimtab.kernels.rms_norm import impl_triton as norm
    from trimtab.kernels.rope import impl_triton as rope

    kernels = (kernels_forward, kernels_backward, launch_triton, gated, norm, rope, partial_sums)
    shape = PLAIN.of_layers(range(2))
    plain = made(shape, attention="sdpa_math")
    compiled = made(shape, attention="triton", pointwise="triton")
    compile_regions(compiled, backend="aot_eager")
    with interpreted(*kernels):
        for length in (12, 17):
            ids_BT, layout = batch(length)
            got, want = trained(compiled, ids_BT, layout), trained(plain, ids_BT, layout)
            for x, y in zip(got, want, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5 * float(y.abs().max()) + 1e-8)
    assert compilations()[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_generated_code_matches_the_eager_decoder(recompute: bool, tmp_path: Path) -> None:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path)
    plain, compiled = made(), made()
    recomputed(compiled, recompute)
    compile_regions(compiled)
    for length in (32, 40):
        ids_BT, layout = batch(length)
        got, want = trained(compiled, ids_BT, layout), trained(plain, ids_BT, layout)
        for x, y in zip(got, want, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5 * float(y.abs().max()) + 1e-8)
    assert compilations()[0] == 1
    assert compilations()[1] > 0
    assert any(tmp_path.rglob("*.so"))


def test_the_cache_folder_is_per_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for before in ("", default_cache_dir()):  # torch sets its own on import
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", before)
        own = tmp_path / ".cache" / "trimtab" / "compiled" / source_key()
        assert use_cache_folder() == own
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(own)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    assert use_cache_folder() == Path("/elsewhere")
