"""Recomputed layers overwrite gate inputs with their gradients, and skip unused products.

The kernels' launches are replaced by torch, so that models run on a CPU and every storage is tracked.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.gate_doubles import double_launches
from trimtab.adapt import LoraSettings, add_adapters, init_adapters, recompute
from trimtab.adapt.lora import create_dropout_masks
from trimtab.adapt.spec_recompute import POLICIES
from trimtab.facts.shapes import uniform_shape
from trimtab.kernels.gated_mlp import gated_activation
from trimtab.model import build, init_weights, parts
from trimtab.model.decoder import Decoder
from trimtab.trainer.memory import LiveBytes

N, C, WIDE, L = 64, 16, 1024, 2
"""Tokens, hidden size, intermediate size, layers: the peak is in a feed-forward half."""
SHAPE = uniform_shape("llama", 32, C, WIDE, L, num_heads=2, num_kv_heads=1, head_dim=8)
IDS = torch.randint(0, 32, (1, N), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _launches(monkeypatch: pytest.MonkeyPatch) -> None:
    double_launches(monkeypatch)


ADAPTERS = [None, {"r": 4}, {"r": 4, "use_dora": True}, {"r": 4, "lora_dropout": 0.5}]


def decoder_of(policy: str, tiles: int = 1, *, lora: dict[str, Any] | None) -> Decoder:
    decoder = init_weights(build(SHAPE, dtype="fp32", device="cpu", attention="sdpa_flash"), seed=0)
    if lora is not None:
        add_adapters(decoder, LoraSettings(**lora))
        init_adapters(decoder, seed=0)
        create_dropout_masks(decoder, torch.device("cpu"))
        for name, parameter in decoder.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(len(name)))
    for block in decoder.model.layers:
        block.mlp.pointwise = "triton"
    return recompute.apply(decoder, [policy] * L, mlp_tiles=tiles)


def gradients(decoder: Decoder) -> dict[str, torch.Tensor]:
    decoder.loss(IDS, IDS.roll(-1, 1)).backward()
    return {name: p.grad for name, p in decoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("lora", ADAPTERS, ids=str)
@pytest.mark.parametrize("policy", POLICIES[1:])
def test_bitwise_identical(policy: str, lora: dict[str, Any] | None) -> None:
    want, got = (gradients(decoder_of(name, lora=lora)) for name in ("none", policy))
    assert want.keys() == got.keys()
    assert len(want) > L
    assert all(torch.equal(want[name], got[name]) for name in want)


def never_overwrite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disables overwriting until the test ends, whatever the blocks request."""

    def plain(gate: torch.Tensor, up: torch.Tensor, *, impl: str, overwrite_inputs: bool) -> torch.Tensor:
        return gated_activation(gate, up, impl=impl)

    monkeypatch.setattr(parts, "gated_activation", plain)


def peak(policy: str, tiles: int = 1) -> int:
    decoder = decoder_of(policy, tiles, lora={"r": 4})
    with LiveBytes() as live:
        gradients(decoder)
    return live.peak


@pytest.mark.parametrize("policy", ["pointwise", "selective", "block", "offload_half"])
def test_peak_memory_is_one_intermediate_tensor_lower(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    over = peak(policy)
    never_overwrite(monkeypatch)
    plain = peak(policy)
    assert plain - over == pytest.approx(N * WIDE * 4, rel=0.05)


@pytest.mark.parametrize(("policy", "tiles"), [("none", 1), ("none", 2), ("block", 2)])
def test_where_inputs_are_not_overwritten(policy: str, tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not overwritten: gate and up of layers without recomputation, which other code may read, and those of tiles,
    which have their own backward."""
    over = peak(policy, tiles)
    never_overwrite(monkeypatch)
    assert peak(policy, tiles) == over


def test_hooks_on_gates_get_correct_values() -> None:
    """For example a penalty on activations, whose backward pass also reads them."""
    found = {}
    for policy in ("none", "block", "pointwise"):
        decoder, seen = decoder_of(policy, lora=None), []
        gate = decoder.model.layers[0].mlp.gate_proj
        gate.register_forward_hook(lambda module, inputs, out, seen=seen: seen.append(out.square().mean()))
        (decoder.loss(IDS, IDS.roll(-1, 1)) + 100 * seen[0]).backward()
        found[policy] = gate.weight.grad
    assert torch.equal(found["block"], found["none"])
    assert torch.equal(found["pointwise"], found["none"])


@pytest.mark.parametrize("name", ["mlp", "mlp.down_proj"])
def test_hooks_on_the_feed_forward_get_correct_values(name: str) -> None:
    """A recomputation skips the last product of a block only where no hook reads it."""
    found = {}
    for policy in ("none", "block"):
        decoder, seen = decoder_of(policy, lora={"r": 4}), []
        layer = decoder.model.layers[0].get_submodule(name)
        layer.register_forward_hook(lambda module, inputs, out, seen=seen: seen.append(out.square().mean()))
        (decoder.loss(IDS, IDS.roll(-1, 1)) + 100 * seen[0]).backward()
        found[policy] = [p.grad for p in decoder.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(found["block"], found["none"], strict=True))


class FrozenProducts(TorchDispatchMode):
    """Counts adapted groups that compute the products of their frozen weights, and those that skip them."""

    def __init__(self) -> None:
        super().__init__()
        self.computed = self.skipped = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.trimtab.lora_group.default:
            self.skipped += args[-1]
            self.computed += not args[-1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("policy", "tiles", "computed", "skipped"),
    [
        ("none", 1, 4, 0),
        ("block", 1, 4 + 3, 1),
        ("selective", 1, 4 + 3, 1),
        ("none", 2, 2 + 2 * 2 + 2, 2),
        ("block", 2, 2 + 2 * 2 + 2 + 2, 2),
    ],
)
def test_the_last_product_of_a_recomputed_block_is_skipped(
    policy: str, tiles: int, computed: int, skipped: int
) -> None:
    """Of q, k, v fused, o, gate and up fused, and down: per layer, tiles twice in the forward pass."""
    decoder = decoder_of(policy, tiles, lora={"r": 4})
    with FrozenProducts() as products:
        gradients(decoder)
    assert (products.computed, products.skipped) == (L * computed, L * skipped)


def test_a_retained_graph_can_be_used_again() -> None:
    decoder = decoder_of("block", lora=None)
    loss, weights = decoder.loss(IDS, IDS.roll(-1, 1)), list(decoder.parameters())
    first = torch.autograd.grad(loss, weights, retain_graph=True)
    second = torch.autograd.grad(loss, weights)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
