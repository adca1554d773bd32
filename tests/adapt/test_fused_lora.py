"""LoRA layers with one input in one operator, against separate layers in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trimtab.adapt import workspace
from trimtab.adapt.fused_lora import FusedLayer, lora_group
from trimtab.adapt.quantized import QuantizedLinear
from trimtab.kernels.accuracy import TOLERANCE, check_accuracy

KINDS = ("plain", "nf4", "nf4 single", "int8")
SIZES = (24, 16, 40)
RANKS = (4, 2, 3)
SCALES = (2.0, 0.5, 1.0)


def group(
    kind: str, dtype: torch.dtype, count: int, factors: torch.dtype
) -> tuple[list[FusedLayer], list[Any]]:
    """Parts, and each layer's weight as used in the products."""
    generator = torch.Generator().manual_seed(0)
    parts, weights = [], []
    for size, rank, scaling in list(zip(SIZES, RANKS, SCALES, strict=True))[:count]:
        weight = (torch.randn(size, 64, generator=generator) * 0.1).to(dtype)
        a = (torch.randn(rank, 64, generator=generator) * 0.1).to(factors).requires_grad_(True)
        b = (torch.randn(size, rank, generator=generator) * 0.1).to(factors).requires_grad_(True)
        if kind == "plain":
            parts.append(FusedLayer.plain(weight, a, b, scaling))
        else:
            layer = QuantizedLinear(
                64, size, bias=False, kind=kind.split()[0], double=kind == "nf4", dtype=dtype
            )
            layer.set_weight(weight)
            parts.append(FusedLayer(layer.packed, layer.text, a, b, scaling))
            weight = layer.dequantized()
        weights.append(weight)
    return parts, weights


def one_by_one(
    x: torch.Tensor,
    parts: list[FusedLayer],
    weights: list[torch.Tensor],
    grads: list[torch.Tensor],
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Outputs and gradients of x, every A, every B through plain autograd in one dtype."""
    x = x.detach().to(dtype).requires_grad_(True)
    a = [part.a_RI.detach().to(dtype).requires_grad_(True) for part in parts]
    b = [part.b_OR.detach().to(dtype).requires_grad_(True) for part in parts]
    outputs = [
        x @ weight.to(dtype).t() + part.scaling * (x @ a_RI.t()) @ b_OR.t()
        for part, weight, a_RI, b_OR in zip(parts, weights, a, b, strict=True)
    ]
    torch.autograd.backward(outputs, [grad.to(dtype) for grad in grads])
    return [*(y.detach() for y in outputs), *(t.grad for t in (x, *a, *b))]  # type: ignore[misc]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients(kind: str, count: int, dtype: torch.dtype) -> None:
    parts, weights = group(kind, dtype, count, torch.float32)
    x = torch.randn(2, 5, 64).to(dtype).requires_grad_(True)
    grads = [torch.randn(2, 5, size).to(dtype) for size in SIZES[:count]]
    outputs = lora_group(x, parts)
    torch.autograd.backward(outputs, grads)
    found = [
        *(y.detach() for y in outputs),
        x.grad,
        *(p.a_RI.grad for p in parts),
        *(p.b_OR.grad for p in parts),
    ]
    truth = one_by_one(x, parts, weights, grads, torch.float64)
    plain = one_by_one(x, parts, weights, grads, dtype)
    for mine, exact, reference in zip(found, truth, plain, strict=True):
        assert mine is not None
        tolerance = TOLERANCE["fp32" if dtype == torch.float32 else "bf16"]
        assert check_accuracy("", mine, truth=exact, reference=reference, tolerance=tolerance)
        assert not check_accuracy("", mine * 1.01, truth=exact, reference=exact, tolerance=tolerance)


def test_x_without_gradient_skips_its_product() -> None:
    parts, _ = group("nf4", torch.float32, 2, torch.float32)
    x = torch.randn(7, 64)
    outputs = lora_group(x, parts)
    sum(y.sum() for y in outputs).backward()  # type: ignore[union-attr]
    h_NR = x @ parts[0].a_RI.t()
    assert torch.allclose(parts[0].b_OR.grad, 2.0 * torch.ones(24, 7) @ h_NR)  # type: ignore[arg-type]
    with torch.no_grad():
        assert all(torch.equal(a, b) for a, b in zip(lora_group(x, parts), outputs, strict=True))


def test_an_unused_output_adds_no_gradient() -> None:
    parts, weights = group("nf4", torch.float32, 2, torch.float32)
    x = torch.randn(7, 64, requires_grad=True)
    lora_group(x, parts)[1].sum().backward()
    assert x.grad is not None
    a, b = parts[1].a_RI.detach(), parts[1].b_OR.detach()
    assert torch.allclose(x.grad, torch.ones(7, 16) @ (weights[1] + 0.5 * b @ a), atol=1e-6)
    assert parts[0].b_OR.grad is not None
    assert not parts[0].b_OR.grad.any()


@pytest.mark.parametrize("kind", KINDS)
def test_saved_for_the_backward_pass(kind: str) -> None:
    parts, _ = group(kind, torch.float32, 3, torch.float32)
    x = torch.randn(50, 64, requires_grad=True)
    there = {
        t.untyped_storage().data_ptr()
        for part in parts
        for t in (*part.packed, part.a_RI, part.b_OR)
        if t is not None
    }
    there.add(x.untyped_storage().data_ptr())
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in there:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        lora_group(x, parts)
    assert sum(kept.values()) == 50 * sum(RANKS) * 4, "H alone"


@pytest.mark.parametrize("kind", ["plain", "nf4"])
def test_operators_pass_opcheck(kind: str) -> None:
    parts, _ = group(kind, torch.float32, 2, torch.float32)
    x = torch.randn(3, 64, requires_grad=True)
    packed = [t for part in parts for t in part.packed if t is not None]
    a, b = [part.a_RI for part in parts], [part.b_OR for part in parts]
    rest = (packed, a, b, [part.scaling for part in parts], ";".join(part.text for part in parts))
    torch.library.opcheck(torch.ops.trimtab.lora_group, (x, torch.randn(3, 6), *rest, False))
    dy = [torch.randn(3, size) for size in SIZES[:2]]
    with torch.no_grad():
        for wants_dx in (True, False):
            arguments = (dy, x.detach(), torch.randn(3, 6), *rest, wants_dx)
            torch.library.opcheck(torch.ops.trimtab.lora_group_gradients, arguments)


@pytest.mark.parametrize("kind", ["plain", "nf4", "int8"])
def test_compiles_to_one_graph_for_any_number_of_tokens(kind: str) -> None:
    parts, _ = group(kind, torch.float32, 3, torch.float32)
    compiled = torch.compile(
        lambda x: [y.relu() for y in lora_group(x, parts)], fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for tokens in (5, 9, 17):
        results = []
        for function in (compiled, lambda x: [y.relu() for y in lora_group(x, parts)]):
            x = torch.randn(2, tokens, 64, generator=torch.Generator().manual_seed(tokens)).requires_grad_(
                True
            )
            for part in parts:
                part.a_RI.grad = part.b_OR.grad = None
            outputs = function(x)
            torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
            results.append([*outputs, x.grad, *(p.a_RI.grad for p in parts), *(p.b_OR.grad for p in parts)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


GPU = pytest.mark.gpu


@GPU
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("rows", [1, 2, 300])
def test_on_a_gpu(kind: str, rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    parts, weights = [], []
    for size, rank, scaling in zip((512, 256, 1024), (16, 8, 16), SCALES, strict=True):
        layer = QuantizedLinear(
            512, size, bias=False, kind=kind, dtype=torch.bfloat16, impl="triton", device="cuda"
        )
        layer.set_weight(torch.randn(size, 512, generator=generator) * 0.02)
        a = (torch.randn(rank, 512, generator=generator) * 0.05).cuda().requires_grad_(True)
        b = (torch.randn(size, rank, generator=generator) * 0.05).cuda().requires_grad_(True)
        parts.append(FusedLayer(layer.packed, layer.text, a, b, scaling))
        weights.append(layer.dequantized())
    x = torch.randn(rows, 512, generator=generator).bfloat16().cuda().requires_grad_(True)
    outputs = lora_group(x, parts)
    grads = [torch.randn_like(y) for y in outputs]
    torch.autograd.backward(outputs, grads)
    found = [y.detach() for y in outputs]
    found += [x.grad, *(p.a_RI.grad for p in parts), *(p.b_OR.grad for p in parts)]
    truth = one_by_one(x, parts, weights, grads, torch.float64)
    plain = one_by_one(x, parts, weights, grads, torch.bfloat16)
    for mine, exact, reference in zip(found, truth, plain, strict=True):
        assert check_accuracy("", mine, truth=exact, reference=reference, tolerance=TOLERANCE["bf16"])


@GPU
def test_streams_do_not_share_a_workspace() -> None:
    layers, expected = [], []
    x = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    for seed in range(2):
        layer = QuantizedLinear(
            2048, 4096, bias=False, kind="nf4", dtype=torch.bfloat16, impl="triton", device="cuda"
        )
        layer.set_weight(torch.randn(4096, 2048, generator=torch.Generator().manual_seed(seed)) * 0.02)
        layers.append(layer)
        expected.append(layer(x))
    streams = [torch.cuda.Stream() for _ in layers]
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for layer, stream, kept in zip(layers, streams, results, strict=True):
            with torch.cuda.stream(stream):
                kept.append(layer(x))
    torch.cuda.synchronize()
    for kept, right in zip(results, expected, strict=True):
        assert all(torch.equal(y, right) for y in kept)


@GPU
def test_a_pass_allocates_one_dequantized_weight() -> None:
    workspace.release()
    layer = QuantizedLinear(
        4096, 4096, bias=False, kind="nf4", dtype=torch.bfloat16, impl="triton", device="cuda"
    )
    layer.set_weight(torch.randn(4096, 4096) * 0.02)
    x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layer(x).sum().backward()
    torch.cuda.synchronize()
    above = torch.cuda.max_memory_allocated() - before
    weight = 2 * 4096 * 4096
    assert weight <= above <= weight + 4 * x.numel() * 2 + 2**21
    assert workspace.allocated_bytes("cuda") == weight
