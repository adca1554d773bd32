"""Recorded origins of tensors, module and line, in the forward and the backward pass."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from trimtab.kernels.gated_mlp import impl_reference
from trimtab.run.allocations import AllocationRecorder


class Gate(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.up(x)
        return impl_reference.gated_activation(wide, wide, "silu")


def test_module_and_line_of_a_forward_pass() -> None:
    model = torch.nn.Sequential(Gate(), torch.nn.Tanh())
    recorder = AllocationRecorder()
    recorder.watch(model)
    x = torch.randn(4, 16)
    with recorder:
        out = model(x)
        gated = out.grad_fn.next_functions[0][0]  # the product's node keeps what it multiplied
        made = recorder.origin_of(gated._saved_self.untyped_storage())
    assert recorder.origin_of(x.untyped_storage()) is None
    result = recorder.origin_of(out.untyped_storage())
    assert result is not None
    assert result.module == "1"
    assert made is not None
    assert made.module == "0"
    assert made.line is not None
    assert made.line.startswith("trimtab/kernels/gated_mlp/impl_reference.py:")


def test_backward_operations_get_the_origin_of_their_forward() -> None:
    model = torch.nn.Sequential(Gate(), torch.nn.Tanh())
    recorder = AllocationRecorder()
    recorder.watch(model)
    with recorder:
        model(torch.randn(4, 16)).sum().backward()
    gradient = model[0].up.weight.grad
    made = recorder.origin_of(gradient.untyped_storage())
    assert made is not None
    assert made.module == "backward of 0.up"


def test_freed_storages_are_forgotten_and_modules_are_restored() -> None:
    model = torch.nn.Sequential(Gate())
    recorder = AllocationRecorder()
    recorder.watch(model)
    with recorder:
        out = model(torch.randn(4, 16))
        assert recorder._made
        del out
    assert not recorder._made
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_failing_module_is_removed_from_the_module_stack() -> None:
    class Failing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError

    model = torch.nn.ModuleDict({"failing": Failing(), "gate": Gate()})
    recorder = AllocationRecorder()
    recorder.watch(model)
    with recorder:
        with pytest.raises(ValueError):
            model["failing"](torch.zeros(1))
        kept = torch.zeros(3) + 1
        made = recorder.origin_of(kept.untyped_storage())
    assert made is not None
    assert made.module is None


def test_losses_are_identical_without_recording() -> None:
    model = torch.nn.Sequential(Gate(), torch.nn.Linear(32, 1))
    x = torch.randn(4, 16)
    model(x).sum().backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    recorder = AllocationRecorder()
    recorder.watch(model)
    with recorder:
        model(x).sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters(), strict=True))


def test_an_autograd_function_has_an_origin_in_backward() -> None:
    """Inside an autograd.Function gradients are disabled; its node has an origin nevertheless."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x * 2

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            kept.append(grad * 2)
            return kept[0]

    class Doubling(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Double.apply(x)

    kept: list[torch.Tensor] = []
    model = torch.nn.Sequential(Doubling(), torch.nn.Tanh())
    recorder = AllocationRecorder()
    recorder.watch(model)
    with recorder:
        model(torch.ones(4, requires_grad=True)).sum().backward()
    made = recorder.origin_of(kept[0].untyped_storage())
    assert made is not None
    assert made.module == "backward of 0"


def test_a_recomputed_module_is_named_as_such() -> None:
    model = torch.nn.Sequential(Gate(), torch.nn.Tanh())
    recorder = AllocationRecorder()
    recorder.watch(model)
    seen = []

    class Seeing(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            seen.append(recorder.last_origin.module)
            return out

    with Seeing(), recorder:
        checkpoint(model[0], torch.randn(4, 16, requires_grad=True), use_reentrant=False).sum().backward()
    assert "recomputation of 0.up" in seen


def test_modules_have_no_hooks_while_they_are_tracked() -> None:
    """With hooks adapters would run one by one, and recomputation would save tensors that it can free."""
    model = torch.nn.Sequential(Gate())
    recorder = AllocationRecorder()
    recorder.watch(model)
    with recorder:
        assert not any(module._forward_hooks for module in model.modules())
