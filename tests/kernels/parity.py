"""The comparison that the tests of every operation share: truth in fp64, the output and all gradients.

An operation is a function of tensors by name, `call(impl, **tensors) -> tensor or tuple of tensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from tests.kernels.triton_tools import interpreted
from trimtab.facts.dtypes import TORCH_NAMES
from trimtab.kernels.accuracy import TOLERANCE, AccuracyCheck, check_accuracy

Call = Callable[..., Any]
Tensors = dict[str, torch.Tensor]

UPSTREAM = ("drawn", "expanded", "transposed")
"""Kinds of upstream gradients: a tensor of its own, one expanded element (from a sum), and not contiguous."""


@contextmanager
def poisoned() -> Iterator[None]:
    """Fills memory from torch.empty with NaN: elements that a kernel does not write show."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@contextmanager
def interpreter(*modules: ModuleType) -> Iterator[None]:
    """Runs the kernels of these modules in Triton's interpreter, on poisoned memory."""
    with interpreted(*modules), poisoned():
        yield


def upstream(out: torch.Tensor, kind: str, seed: int) -> torch.Tensor:
    """A gradient for `out`, the same values whatever its dtype."""
    if kind == "expanded":
        return torch.tensor(0.75, device=out.device, dtype=out.dtype).expand(out.shape)
    generator = torch.Generator(out.device).manual_seed(1000 + seed)
    g = torch.randn(out.shape, generator=generator, device=out.device).bfloat16().to(out.dtype)
    if kind == "transposed" and out.ndim > 1:
        g = g.transpose(0, -1).contiguous().transpose(0, -1)
    return g


def run(call: Call, impl: str, tensors: Tensors, kind: str = "drawn") -> Tensors:
    """Outputs and the gradients of all inputs that require one, by name; asserts that inputs are unchanged."""
    leaves = {
        name: x.detach().requires_grad_() if x.requires_grad else x.detach() for name, x in tensors.items()
    }
    before = {name: x.detach().clone() for name, x in leaves.items()}
    outs = call(impl, **leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    named = {f"out{i}": out.detach() for i, out in enumerate(outs)}
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    gradients = [upstream(out, kind, i) for i, out in enumerate(outs)]
    kept = [g.clone() for g in gradients]
    found = torch.autograd.grad(outs, list(wanted.values()), gradients)
    for name, x in leaves.items():
        assert torch.equal(x.detach(), before[name]), f"{impl} wrote into {name}"
    for g, old in zip(gradients, kept, strict=True):
        assert torch.equal(g, old), f"{impl} wrote into the upstream gradient"
    return named | {f"grad {name}": g for name, g in zip(wanted, found, strict=True)}


def cast(tensors: Tensors, dtype: str, device: str) -> Tensors:
    """Copies in another dtype and device with the same strides; what is always fp32 (cosines) only goes to fp64."""
    target = getattr(torch, TORCH_NAMES[dtype])
    wide = torch.float64 if dtype == "fp64" else torch.float32
    out = {}
    for name, x in tensors.items():
        to = (target if x.requires_grad else wide) if x.is_floating_point() else x.dtype
        out[name] = x.detach().to(device=device, dtype=to).requires_grad_(x.requires_grad)
    return out


def accuracy_checks(
    call: Call,
    tensors: Tensors,
    dtype: str,
    *,
    impl: str = "triton",
    device: str = "cpu",
    kind: str = "drawn",
    factor: float = 1.0,
    around: Callable[[], Any] = poisoned,
    floor: float = 0.0,
) -> list[AccuracyCheck]:
    """Compares every output and gradient of `impl` with the fp64 truth.

    `tensors` are fp32 (bf16 values, so that casts are exact).
    """
    truth = run(call, "reference", cast(tensors, "fp64", device), kind)
    own = run(call, "reference", cast(tensors, dtype, device), kind)
    with around():
        got = run(call, impl, cast(tensors, dtype, device), kind)
    found = []
    for name, want in truth.items():
        assert got[name].dtype == own[name].dtype, (name, got[name].dtype, own[name].dtype)
        found.append(
            check_accuracy(
                name,
                got[name] * factor,
                truth=want,
                reference=own[name],
                tolerance=TOLERANCE[dtype],
                floor=floor,
            )
        )
    return found
