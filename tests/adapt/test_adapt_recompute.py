"""Recompute policies: bitwise identical, fewer saved activations, exactly as declared; also in compiled blocks."""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from mmap import PAGESIZE
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.plan.declared import blocks_by_layer, bytes_around, full_training
from trimtab.adapt import (
    LoraSettings,
    add_adapters,
    init_adapters,
    offload,
    offloaded_activations,
    quantize_layout,
    recompute,
)
from trimtab.adapt import spec_recompute as recompute_spec
from trimtab.adapt.lora import create_dropout_masks
from trimtab.adapt.spec_recompute import (
    ATTENTION_OPERATORS,
    POLICIES,
    SAVED_PRODUCTS,
    count_policies,
    recompute_cost,
    saved_under,
    sort_policies,
)
from trimtab.adapt.tiled import tiled
from trimtab.facts.errors import RecipeError, ResourceError
from trimtab.facts.operations import total_bytes
from trimtab.facts.shapes import ModelShape, uniform_shape
from trimtab.kernels.attention import IMPLS, Layout
from trimtab.kernels.attention.spec import TILED
from trimtab.kernels.linear_cross_entropy import linear_cross_entropy
from trimtab.model import build, init_weights
from trimtab.model.decoder import Decoder
from trimtab.model.labels import current_label
from trimtab.model.spec import product_flops
from trimtab.plan.layers import num_tiles
from trimtab.trainer.memory import LiveBytes

L = len(POLICIES)
"""Layers: one for each policy."""
LLAMA = uniform_shape(
    "llama", 128, 64, 160, num_layers=L, num_heads=4, num_kv_heads=2, head_dim=16, tie_embeddings=True
)
QWEN3 = uniform_shape(
    "qwen3", 128, 64, 192, num_layers=L, num_heads=4, num_kv_heads=1, head_dim=32, qk_norm=True
)
SQUARE = uniform_shape("llama", 128, 64, 64, num_layers=L, num_heads=4, num_kv_heads=4, head_dim=16)
"""All matrices have the same size: no product can be distinguished from another by its size."""
B, T = 2, 96
MIXES = [*((policy,) * L for policy in POLICIES), POLICIES, sort_policies(POLICIES)]
IDS = torch.randint(0, 128, (B, T), generator=torch.Generator().manual_seed(0))


def decoder_of(shape: ModelShape, dtype: str = "fp32", attention: str = "sdpa_flash") -> Decoder:
    return init_weights(build(shape, dtype=dtype, device="cpu", attention=attention), seed=0)


def trained(decoder: Decoder, autocast: bool = False, layout: Layout | None = None) -> list[Any]:
    """Loss and every gradient."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = decoder.loss(IDS, IDS.roll(-1, 1), None, layout)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in decoder.parameters())]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("policies", MIXES, ids=str)
def test_bitwise_identical(policies: tuple[str, ...], autocast: bool) -> None:
    for shape in (LLAMA, QWEN3):
        plain, other = decoder_of(shape), decoder_of(shape)
        assert recompute.apply(other, policies) is other
        assert [n for n, _ in other.named_parameters()] == [n for n, _ in shape.parameters()]
        packed = Layout.packed((torch.arange(T).expand(B, T) >= 40).int())
        want, got = trained(plain, autocast, packed), trained(other, autocast, packed)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("attention", ["reference", "sdpa_math"])
def test_bitwise_identical_with_plain_attention(attention: str) -> None:
    want, other = trained(decoder_of(QWEN3, attention=attention)), decoder_of(QWEN3, attention=attention)
    got = trained(recompute.apply(other, POLICIES))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("tiles", [1, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("policy", POLICIES)
def test_saved_activations_match_the_spec(policy: str, dtype: str, tiles: int) -> None:
    for shape in (LLAMA, QWEN3, SQUARE):
        decoder = recompute.apply(decoder_of(shape, dtype), [policy] * L, mlp_tiles=tiles)
        with LiveBytes() as live:
            hidden_BTC = decoder(IDS)
            kept = live.now - hidden_BTC.untyped_storage().nbytes()
        job = full_training(shape, B, T, dtype, packed=False, mlp_tiles=tiles)
        declared = sum(total_bytes(saved_under(block, policy)) for block in blocks_by_layer(job))
        assert kept == declared + bytes_around(job)


def test_policies_are_bitwise_identical_with_qkv_biases() -> None:
    """A projection with a bias is another operator, aten::addmm, whose results the policies save too."""
    shape = uniform_shape(
        "qwen2", 128, 64, 96, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=8, qkv_bias=True
    )
    want = trained(decoder_of(shape))
    got = trained(recompute.apply(decoder_of(shape), ["pointwise", "selective"]))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def recomputed_per_token(policy: str, tiles: int = 1) -> recompute_spec.RecomputeCost:
    """The FLOPs that a layer of LLAMA recomputes under a policy, per token."""
    job = full_training(LLAMA, B, T, mlp_tiles=tiles)
    again = recompute_cost(blocks_by_layer(job)[0], policy, num_tiles(job))
    per_token = {field: value / (B * T) for field, value in vars(again).items()}
    return recompute_spec.RecomputeCost(**per_token)


def test_recomputed_flops() -> None:
    plain = {policy: recomputed_per_token(policy) for policy in POLICIES}
    assert plain["none"].products == plain["pointwise"].products == 0
    block = blocks_by_layer(full_training(LLAMA, B, T))[0]
    again = {policy: recompute_spec.recomputed_operations(block, policy) for policy in ("none", "pointwise")}
    assert not again["none"]
    assert sum(operation.forward.moved for operation in again["pointwise"]) > 0
    down, layer = 2 * LLAMA.hidden_size * LLAMA.intermediate_size, product_flops(LLAMA) / L
    assert plain["selective"].products == plain["block"].products == layer - down
    assert plain["selective"].attention == 0 < plain["block"].attention == plain["offload"].attention
    attention = layer - 3 * down
    # Four tiles of at most 64 tokens cover 192: the last is not full, but counted as full.
    in_tiles = {policy: recomputed_per_token(policy, tiles=3).products for policy in POLICIES}
    assert in_tiles["none"] == 3 * down
    assert in_tiles["block"] == layer
    assert in_tiles["selective"] == 3 * down + attention * 2 / 3


class Products(TorchDispatchMode):
    """Counts the FLOPs of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.flops += 2 * args[0].shape[0] * args[0].shape[1] * args[1].shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("policy", POLICIES)
def test_declared_flops_match_the_products_that_run(policy: str, tiles: int) -> None:
    flops = []
    for policies, count in ((["none"] * L, 1), ([policy] * L, tiles)):
        decoder = recompute.apply(decoder_of(LLAMA), policies, mlp_tiles=count)
        with Products() as products:
            decoder.loss(IDS, IDS.roll(-1, 1)).backward()
        flops.append(products.flops)
    assert (flops[1] - flops[0]) / (B * T * L) == recomputed_per_token(policy, tiles).products


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("policies", MIXES, ids=str)
def test_tiles_give_the_same_results(policies: tuple[str, ...], autocast: bool) -> None:
    want = trained(decoder_of(LLAMA), autocast)
    for tiles in (2, 7, B * T + 5):
        got = trained(recompute.apply(decoder_of(LLAMA), policies, mlp_tiles=tiles), autocast)
        for a, b in zip(got, want, strict=True):
            rtol = 0.03 if autocast else 1e-5
            torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * float(b.abs().max()))


def test_tiles_without_gradients_and_with_frozen_weights() -> None:
    decoder = recompute.apply(decoder_of(LLAMA), ["none"] * L, mlp_tiles=3)
    plain = decoder_of(LLAMA)
    with torch.no_grad():
        torch.testing.assert_close(decoder(IDS), plain(IDS))
    for model in (decoder, plain):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp.up_proj" in name or "layers.4" in name)
    want, got = trained(plain), trained(decoder)
    assert any(grad is None for grad in want)
    assert any(grad is not None for grad in want[1:])
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


def test_gradients_of_tiles_are_accumulated_in_fp32() -> None:
    layer = torch.nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    layer.weight.grad_dtype = torch.float32
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    tiled(layer, x, list(layer.parameters()), 256).float().sum().backward()
    truth = x.double().sum(0).expand(8, 8)
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    torch.testing.assert_close(layer.weight.grad.double(), truth, rtol=0.004, atol=0.05)


def adapted(kind: str | None, **lora: Any) -> Decoder:
    """Nonzero adapters on plain or packed weights."""
    decoder = build(LLAMA, dtype="fp32", device="meta", attention="sdpa_flash")
    if kind is not None:
        quantize_layout(decoder, kind, device="cpu")
    add_adapters(decoder, LoraSettings(r=4, **lora))
    init_weights(decoder.to_empty(device="cpu"), 0)
    init_adapters(decoder, seed=0)
    for name, parameter in decoder.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.02, generator=torch.Generator().manual_seed(1))
    masks = create_dropout_masks(decoder, torch.device("cpu"))
    if masks is not None:
        masks.set(1, step=2, first_sequence=0, tokens=T)
    return decoder


ADAPTERS = [{}, {"use_dora": True}, {"lora_dropout": 0.2}, {"target_modules": ("q_proj", "down_proj")}]


@pytest.mark.parametrize("kind", [None, "nf4"])
@pytest.mark.parametrize("lora", ADAPTERS, ids=str)
def test_adapters_under_every_policy(lora: dict[str, Any], kind: str | None) -> None:
    want = trained(adapted(kind, **lora))
    for policies in MIXES[1:]:
        got = trained(recompute.apply(adapted(kind, **lora), policies))
        assert all(a is b is None or torch.equal(a, b) for a, b in zip(got, want, strict=True)), policies
    for tiles in (3, 8):  # dropout masks are the same too
        got = trained(recompute.apply(adapted(kind, **lora), POLICIES, mlp_tiles=tiles))
        for a, b in zip(got, want, strict=True):
            if b is not None:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))


def compiled_loss(decoder: Decoder, backend: str) -> torch.Tensor:
    """The decoder's loss with every layer compiled as one graph."""
    compiler = functools.partial(torch.compile, fullgraph=True, dynamic=True, backend=backend)
    layout = Layout.causal()
    layout.prepare("sdpa_flash", "cpu", T)
    x_BTC = decoder.model.embed_tokens(IDS)
    cos_BTF, sin_BTF = next(iter(decoder.rotary.values())).cos_sin(
        torch.arange(T).expand_as(IDS), x_BTC.dtype
    )
    for i, block in enumerate(decoder.model.layers):
        with decoder.layer_context(i, x_BTC):
            x_BTC = recompute.compile_block(block, compiler)(x_BTC, cos_BTF, sin_BTF, layout)
    hidden_NC = decoder.model.norm(x_BTC).flatten(0, 1)
    return linear_cross_entropy(hidden_NC, decoder.head_weight, IDS.roll(-1, 1).flatten(), reduction="sum")


@pytest.mark.parametrize("tiles", [1, 3])
def test_blocks_compile_to_full_graphs_under_every_policy(tiles: int) -> None:
    torch._dynamo.reset()
    want = trained(recompute.apply(decoder_of(LLAMA), POLICIES, mlp_tiles=tiles))
    decoder = recompute.apply(decoder_of(LLAMA), POLICIES, mlp_tiles=tiles)
    loss = compiled_loss(decoder, "aot_eager")
    loss.backward()
    got = [loss.detach(), *(parameter.grad for parameter in decoder.parameters())]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


ATTENTION_PRODUCTS = {("attention", "weight"): 4, ("attention", "adapter_a"): 4}
ALL_PRODUCTS = {**ATTENTION_PRODUCTS, ("gate_up", "weight"): 2, ("gate_up", "adapter_a"): 2}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("policy", "want"),
    [
        ("pointwise", ALL_PRODUCTS),
        ("selective", {}),
        ("offload_half", {("attention", "weight"): 4}),
        ("offload_attention", {}),
    ],
)
def test_products_are_distinguished_by_label(
    policy: str, want: dict[tuple[str, str], int], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every matrix is 64 × 64, adapters' factors included; in a compiled block the labels are those of its graph."""
    torch._dynamo.reset()
    saved: Counter[tuple[Any, ...]] = Counter()
    is_saved = recompute._is_saved

    def noted(policy: str, operator: Any) -> bool:
        found = is_saved(policy, operator)
        if found:
            name = recompute._name(operator)
            saved[current_label() if name in recompute.PRODUCT_OPERATORS else name] += 1
        return found

    monkeypatch.setattr(recompute, "_is_saved", noted)
    decoder = decoder_of(SQUARE.of_layers(range(1)))
    add_adapters(decoder, LoraSettings(r=64, lora_dropout=0.5))
    init_adapters(decoder, seed=0)
    create_dropout_masks(decoder, torch.device("cpu"))
    recompute.apply(decoder, [policy])
    loss = compiled_loss(decoder, backend) if backend == "aot_eager" else decoder.loss(IDS, IDS.roll(-1, 1))
    times = saved.pop(
        "aten::_scaled_dot_product_flash_attention_for_cpu"
    )  # each time the block is run or traced
    assert {label: count / times for label, count in saved.items()} == want
    loss.backward()
    assert decoder.get_parameter("model.layers.0.mlp.up_proj.lora_B.default.weight").grad is not None


class Shelf(offload.HostStore):
    """A store without a GPU that copies tensors on the CPU and records the order of copies."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.freed: list[bool] = []

    def _next_layer(self) -> Any:
        return None

    def offload(self, tensors: Sequence[torch.Tensor]) -> Any:
        return self._offload(tensors, None)

    def _offload(self, tensors: Sequence[torch.Tensor], layer: Any) -> Any:
        return [self._offload_one(x.detach()) for x in tensors]

    def _offload_one(self, x: torch.Tensor) -> Any:
        shelf, number = self, self.log.count("put")
        storage = weakref.ref(x.untyped_storage())
        shelf.log.append("put")

        class Copied(offload._OffloadedTensor):
            def __init__(self, copy: torch.Tensor) -> None:
                self.copy = copy
                weakref.finalize(self, shelf.log.append, f"gone {number}")

            def get(self) -> torch.Tensor:
                shelf.log.append(f"get {number}")
                shelf.freed.append(storage() is None)
                return self.copy

        return Copied(x.clone())


@contextmanager
def shelved(decoder: Decoder) -> Iterator[Shelf]:
    shelf = Shelf()
    decoder.layer_context = lambda layer, x_BTC: shelf.offload_input(x_BTC)
    yield shelf


@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("compiled", [False, True])
def test_only_a_layers_input_is_offloaded_and_not_kept_elsewhere(compiled: bool, tiles: int) -> None:
    torch._dynamo.reset()
    want = trained(recompute.apply(decoder_of(LLAMA), ["block"] * L, mlp_tiles=tiles))
    decoder = recompute.apply(decoder_of(LLAMA), ["block"] * L, mlp_tiles=tiles)
    with shelved(decoder) as shelf:
        loss = compiled_loss(decoder, "aot_eager") if compiled else decoder.loss(IDS, IDS.roll(-1, 1))
        loss.backward()
    came_and_went = [f"{what} {i}" for i in reversed(range(L)) for what in ("get", "gone")]
    assert shelf.log == ["put"] * L + came_and_went, (
        "buffers are freed right after use, without garbage collection"
    )
    assert all(shelf.freed), "something else on the device still referenced a layer's input"
    got = [loss.detach(), *(parameter.grad for parameter in decoder.parameters())]
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


class Attended(TorchDispatchMode):
    """Counts how often attention runs, and the products before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.times = self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = recompute._name(func)
        self.times += name in recompute.SAVED_ATTENTION
        self.products += name == "trimtab::lora_group" and current_label().projection == "attention"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("kind", [None, "nf4"])
@pytest.mark.parametrize("policy", ["offload_half", "offload_attention"])
def test_expensive_results_are_offloaded_and_not_recomputed(
    policy: str, kind: str | None, tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloaded_activations, "MIN_ELEMENTS", 1000)
    want = trained(recompute.apply(adapted(kind), ["none"] * L, mlp_tiles=tiles))
    decoder = recompute.apply(adapted(kind), [policy] * L, mlp_tiles=tiles)
    offloading = decoder.layer_context
    assert isinstance(offloading, recompute._Offloading)
    with shelved(decoder) as shelf, Attended() as attended:
        offloading.store = shelf
        loss = decoder.loss(IDS, IDS.roll(-1, 1))
        loss.backward()
    got = [loss.detach(), *(parameter.grad for parameter in decoder.parameters())]
    for a, b in zip(got, want, strict=True):
        assert a is b is None or torch.equal(a, b)
    assert attended.times == L, "once per layer, in the forward pass"
    # Per layer the input and attention's output (the log-sum-exp is small and stays), and q, k, v, o.
    puts = shelf.log.count("put")
    assert puts == L * (2 if policy == "offload_attention" else 6), shelf.log
    passes = {"offload_half": 1, "offload_attention": 2}[policy]
    assert attended.products == passes * 2 * L, "q, k, v together, and o"
    assert sorted(line for line in shelf.log if line.startswith("get")) == sorted(
        f"get {number}" for number in range(puts)
    )
    assert sum(line.startswith("gone") for line in shelf.log) == puts, (
        "no buffer waits for garbage collection"
    )


@pytest.mark.parametrize("impl", IMPLS)
def test_every_attention_backend_is_listed(impl: str) -> None:
    """A backend that is missing would be recomputed silently where a policy promises to save its results."""
    assert impl in ATTENTION_OPERATORS, f"list the operators of attention {impl} in spec_recompute"
    assert bool(ATTENTION_OPERATORS[impl]) == (impl in TILED), "layer_bytes counts results of tiled backends"


def test_every_listed_backend_exists() -> None:
    assert set(ATTENTION_OPERATORS) == set(IMPLS)
    assert SAVED_PRODUCTS.keys() <= set(POLICIES)


class AttentionRuns(TorchDispatchMode):
    """Counts how often the operators of one attention backend run."""

    def __init__(self, impl: str) -> None:
        super().__init__()
        self.names, self.times = ATTENTION_OPERATORS[impl], 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.times += recompute._name(func) in self.names
        return func(*args, **(kwargs or {}))


def attention_runs(impl: str, policy: str, device: str, dtype: str) -> float:
    """Times per layer that attention runs in a training step."""
    decoder = init_weights(build(QWEN3, dtype=dtype, device=device, attention=impl), seed=0)
    recompute.apply(decoder, [policy] * L)
    ids_BT = torch.arange(2 * 256, device=device).view(2, 256) % 128
    with AttentionRuns(impl) as runs:
        decoder.loss(ids_BT, ids_BT.roll(-1, 1)).backward()
    return runs.times / L


@pytest.mark.parametrize(("policy", "times"), [("block", 2), ("selective", 1), ("pointwise", 1)])
def test_saved_attention_is_not_recomputed(policy: str, times: int) -> None:
    assert attention_runs("sdpa_flash", policy, "cpu", "fp32") == times


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("impl", [impl for impl in TILED if impl != "flex"])
def test_saved_attention_is_not_recomputed_on_a_gpu(impl: str) -> None:
    """FlexAttention, a higher-order operator that is compiled, is invisible to a Python dispatch mode."""
    assert attention_runs(impl, "block", "cuda", "bf16") == 2
    assert attention_runs(impl, "selective", "cuda", "bf16") == 1


def test_policies_are_sorted_and_counted() -> None:
    assert sort_policies(POLICIES) == tuple(reversed(POLICIES))
    assert count_policies(("none", "block", "none")) == {"block": 1, "none": 2}


def test_invalid_policies_raise() -> None:
    decoder = decoder_of(LLAMA)
    with pytest.raises(RecipeError, match=f"3 recompute policies for {L} layers"):
        recompute.apply(decoder, ["none"] * 3)
    with pytest.raises(RecipeError, match=r"'full'.*use one of none, pointwise, selective, block, offload"):
        recompute.apply(decoder, ["full"] * L)


def test_policies_can_be_reset() -> None:
    decoder = recompute.apply(decoder_of(LLAMA), ["offload"] * L, mlp_tiles=2)
    recompute.apply(decoder, ["none"] * L)
    want = trained(decoder_of(LLAMA))
    assert all(torch.equal(a, b) for a, b in zip(trained(decoder), want, strict=True))


class Runtime:
    """A fake of CUDA's runtime for pinning: records registrations and returns a fixed result."""

    def __init__(self, answer: int = 0) -> None:
        self.answer, self.pages, self.registered = answer, [], 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.pages += range(address // PAGESIZE, (address + size - 1) // PAGESIZE + 1)
        self.registered += 1
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        self.registered -= 1
        return 0


def test_pinned_buffers_share_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    buffers = [offload._Pinned(size) for size in (1, 5000, 100_000, 100_000, 8 << 20)]
    assert len(set(runtime.pages)) == len(runtime.pages)
    assert [buffer.tensor.numel() for buffer in buffers] == [1, 5000, 100_000, 100_000, 8 << 20]
    assert runtime.registered == 5
    del buffers
    assert runtime.registered == 0


class Device:
    """A fake of CUDA's streams and events: queued work runs immediately."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        stream = SimpleNamespace(wait_stream=lambda _: None, wait_event=lambda _: None, device="cpu")
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
        monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
        monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda _: None))
        monkeypatch.setattr(torch.cuda, "cudart", Runtime)
        fetch = offload._OffloadedTensor.fetch

        def noted(kept: Any) -> None:
            if kept._device is None:
                self.log.append(kept.note)
            fetch(kept)

        monkeypatch.setattr(offload._OffloadedTensor, "fetch", noted)


def test_a_layers_tensors_are_prefetched_during_the_backward_above(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = Device(monkeypatch)
    store = offload.HostStore("cpu")
    kept, wanted = [], []
    for layer in range(3):
        x = torch.full((4, 4), float(layer))
        results = [torch.full((2, 2, 1), 10.0 + layer).transpose(0, 1), torch.full((4,), 20.0 + layer)]
        packed = [*store._offload([x], store._next_layer()), *store.offload(results)]
        for part, name in zip(packed, ("input", "attention", "sums"), strict=True):
            part.note = f"{name} {layer}"
        kept.append(packed)
        wanted.append((float(layer), 10.0 + layer, 20.0 + layer))
    del x, part, packed
    # The last layer's tensors are still on the device; all others have left.
    assert [part._device is None for parts in kept for part in parts] == [True] * 6 + [False] * 3
    order = []
    for layer in (2, 1, 0):
        parts = kept.pop()
        values = []
        for part in parts:
            values.append(float(part.get().flatten()[0]))
            order.append(list(device.log))
            device.log.clear()
        assert tuple(values) == wanted[layer]
        del parts, part
    # With layer 2's first tensor all of layer 1 is fetched, then all of layer 0; nothing is fetched twice.
    assert order == [
        ["input 1", "attention 1", "sums 1"], [], [],
        ["input 0", "attention 0", "sums 0"], [], [],
        [], [], [],
    ]  # fmt: skip
    assert sum(buffer.num_bytes for buffer, _ in store._free) == store.host_bytes == 3 * (64 + 16 + 16)
    store.clear_events()
    assert all(used is None for _, used in store._free)


@pytest.mark.parametrize("transposed", [True, False])
def test_tensors_keep_their_strides(monkeypatch: pytest.MonkeyPatch, transposed: bool) -> None:
    Device(monkeypatch)
    monkeypatch.setattr(offload._OffloadedTensor, "note", "", raising=False)
    store = offload.HostStore("cpu")
    whole = torch.arange(120.0).view(2, 3, 4, 5)
    x = whole.transpose(1, 2) if transposed else whole[:, :, :, 1:3]
    kept = store.offload([x])[0]
    store._next_layer()
    back = kept.get()
    assert torch.equal(back, x)
    # A tensor with gaps is restored without them.
    assert back.stride() == (x.stride() if transposed else x.contiguous().stride())


def test_memory_that_cannot_be_pinned_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime(answer=2))
    with pytest.raises(ResourceError, match=r"cannot pin .*CUDA error 2.*recompute: block"):
        offload._Pinned(5000)
