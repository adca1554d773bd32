"""Base of all optimizers: named states, allocated on construction, that can be saved and restored.

A checkpoint needs tensors with stable names and a few scalars. `tensors()` returns the former, keyed by the parameter's
name instead of its position in a group, `scalars()` the latter. Random bits derive from seed, step and name, so that a
resumed run is bitwise identical.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from trimtab.facts.errors import CheckpointError, RecipeError
from trimtab.facts.randomness import derive


def group_learning_rate(group: dict[str, Any], lr: float | None) -> float:
    """Returns a group's learning rate: `lr`, or the group's "lr" if None, times its "lr_scale"."""
    rate: float = group["lr"] if lr is None else lr
    return rate * group.get("lr_scale", 1.0)


WEIGHT_DTYPES = (torch.float32, torch.bfloat16)


class NamedOptimizer(torch.optim.Optimizer):
    """Base of all optimizers here; `named_groups` are parameter groups as `parameter_groups` returns them."""

    def __init__(self, named_groups: list[dict[str, Any]], *, lr: float, seed: int) -> None:
        if not any(group["params"] for group in named_groups):
            raise RecipeError("there are no trainable parameters", "unfreeze some, or check the names given")
        super().__init__(named_groups, {"lr": lr, "weight_decay": 0.0})
        self.seed = seed
        self.count = 0
        names = [name for name, _, _ in self._named()]
        assert len(set(names)) == len(names), "two parameters share a name"
        self.index = {name: derive(0, "parameter", name) & 0x7FFFFFFF for name in names}
        for name, p, _ in self._named():
            if p.dtype not in WEIGHT_DTYPES:
                raise RecipeError(f"{name} is {p.dtype}", "use fp32 or bf16 for trained weights")
            if not p.is_contiguous():
                raise RecipeError(f"{name} is not contiguous", "pass contiguous parameters to the optimizer")
            self.state[p] = self._new_state(name, p)

    def _new_state(self, name: str, param: torch.Tensor) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def _update(
        self, group: dict[str, Any], lr: float, grad_scale: torch.Tensor | float, skip: torch.Tensor | None
    ) -> None:
        """Updates one group; if the flag `skip` is true on the device, weights and states must not change."""
        raise NotImplementedError

    def _update_one(
        self,
        name: str,
        param: torch.Tensor,
        group: dict[str, Any],
        lr: float | None,
        grad_scale: torch.Tensor | float,
        skip: torch.Tensor | None,
    ) -> None:
        """Updates one parameter, for `OptimizerInBackward`; `lr` as in `step`."""
        group_of_one = {**group, "params": [param], "param_names": [name]}
        self._update(group_of_one, group_learning_rate(group, lr), grad_scale, skip)

    def _named(self) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                yield name, p, group

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        closure: None = None,
        *,
        lr: float | None = None,
        grad_scale: torch.Tensor | float = 1.0,
        skip: torch.Tensor | None = None,
    ) -> None:
        """Updates every parameter that has a gradient.

        `lr` is this step's learning rate for all groups (by default each group's own "lr"), times a group's "lr_scale"
        if it has one. `grad_scale` multiplies the gradients (clip factor, inverse of a loss scale); a 0-dim tensor
        stays on its device, without synchronization. Gradients may be overwritten by the scaled ones.

        If `skip` (a 0-dim bool tensor) is true, weights and states do not change, also without synchronization. The
        step is still counted, since the host does not read the flag, except on a CPU, where reading it is free.
        """
        assert closure is None, "closures are not supported: compute the gradients before the step"
        if skip is not None and skip.device.type == "cpu":
            if bool(skip):
                return
            skip = None
        self.count += 1
        self._update_all(lr, grad_scale, skip)

    def _update_all(
        self, lr: float | None, grad_scale: torch.Tensor | float, skip: torch.Tensor | None
    ) -> None:
        for group in self.param_groups:
            self._update(group, group_learning_rate(group, lr), grad_scale, skip)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns all states by name ("exp_avg.<parameter>" …): the live tensors, to be saved or loaded in place."""
        return {f"{key}.{name}": t for name, p, _ in self._named() for key, t in self.state[p].items()}

    def scalars(self) -> dict[str, int]:
        """Returns the non-tensor state, for JSON."""
        return {"step": self.count, "seed": self.seed}

    def restore_scalars(self, scalars: dict[str, Any]) -> None:
        """Restores the `scalars()` of a saved run; the caller copies its tensors into `tensors()`."""
        try:
            count, seed = int(scalars["step"]), int(scalars["seed"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the optimizer's scalars cannot be read from {scalars!r}", "use an earlier checkpoint"
            ) from error
        self.count, self.seed = count, seed

    def state_dict(self) -> dict[str, Any]:
        """Returns {"tensors", "scalars"}: torch's format would cast 8-bit and fp32 states to the weights' dtype."""
        return {"tensors": self.tensors(), "scalars": self.scalars()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies a `state_dict()` into this optimizer; names, shapes and dtypes must be the same."""
        mine, theirs = self.tensors(), state_dict["tensors"]
        different = sorted(mine.keys() ^ theirs.keys()) or [
            name for name, t in mine.items() if (t.shape, t.dtype) != (theirs[name].shape, theirs[name].dtype)
        ]
        if different:
            raise CheckpointError(
                f"the optimizer state belongs to another model or optimizer: {different[0]} differs "
                f"({len(different)} in total)",
                "load it into the optimizer and the model that it was saved from",
            )
        for name, t in mine.items():
            t.copy_(theirs[name])
        self.restore_scalars(state_dict["scalars"])
