"""Parameters with their own learning rate."""

from __future__ import annotations

import pytest
import torch

from trimtab import optim


def trained(name: str, scale: float, *, in_backward: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight with the factor and one without, after two steps of equal gradients."""
    torch.manual_seed(0)
    own, other = (torch.nn.Parameter(torch.ones(80, 80)) for _ in range(2))
    optimizer = optim.build(
        name, [("embed", own), ("rest", other)], lr=1.0, weight_decay=0.1, lr_scales={"embed": scale}
    )
    steps = optim.OptimizerInBackward(optimizer) if in_backward else None
    for _ in range(2):
        if steps is not None:
            steps.begin(lr=0.01)
        ((own + other) * torch.linspace(-1, 1, 80)).sum().backward()
        if steps is None:
            optimizer.step(lr=0.01)
        own.grad = other.grad = None
    return own.detach() - 1, other.detach() - 1


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("name", ["adamw_torch", "adamw_8bit", "adamw_bf16"])
def test_a_factor_on_the_learning_rate(name: str, in_backward: bool) -> None:
    own, other = trained(name, 0.25, in_backward=in_backward)
    # 8-bit moments of equal gradients differ a little by parameter.
    assert float((own - 0.25 * other).norm() / other.norm()) < 5e-3


def test_a_factor_of_one_changes_nothing() -> None:
    own, other = trained("adamw_torch", 1.0)
    assert torch.equal(own, other)
