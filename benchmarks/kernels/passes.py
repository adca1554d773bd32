"""Forward and backward of a differentiable operation as two cases, from its spec's inputs. No cases of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from trimtab.lab.contests import Bench, Case, Contestant, disagreement, floor

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Entry:
    """An implementation: the inputs by name → a tensor or several."""

    function: Callable[..., Any]
    ours: bool = False
    in_place: bool = False
    """It overwrites inputs or gradients: it works on copies of its own, checked on fresh ones."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile for exactly these shapes; a backward may be run again and again."""
    import torch._functorch.config as settings

    settings.donated_buffer = False
    return torch.compile(function, fullgraph=True, dynamic=False)


def two_passes(
    op: str,
    name: str,
    *,
    make: Callable[[], Tensors],
    entries: Callable[[], tuple[dict[str, Entry], dict[str, str]]],
    bytes_moved: Callable[[bool], int],
    frozen: tuple[str, ...] = (),
    dtype: str = "bf16",
) -> list[Case]:
    """The cases "name, forward" and "name, backward".

    Args:
        make: The inputs, on the GPU.
        entries: Who takes part, "reference" among them, and who is absent and why; called when a case is built.
        bytes_moved: Of the forward (False) and the backward (True).
        frozen: Inputs without a gradient.
    """
    return [
        Case(
            op,
            f"{name}, {'backward' if backward else 'forward'}",
            build=lambda backward=backward: _build(make, entries, frozen, dtype, backward),  # type: ignore[misc]
            floor=floor(bytes_moved=bytes_moved(backward)),
        )
        for backward in (False, True)
    ]


def _outputs(function: Callable[..., Any], leaves: Tensors) -> tuple[torch.Tensor, ...]:
    out = function(**leaves)
    return out if isinstance(out, tuple) else (out,)


def _upstream(outs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    generator = torch.Generator(outs[0].device).manual_seed(1)
    draws = (torch.randn(out.shape, generator=generator, device=out.device) for out in outs)
    return [g.bfloat16().to(out.dtype) for g, out in zip(draws, outs, strict=True)]


def _leaves(tensors: Tensors, frozen: tuple[str, ...], *, copy: bool) -> Tensors:
    return {
        name: (x.clone() if copy else x).detach().requires_grad_(name not in frozen)
        for name, x in tensors.items()
    }


def _all(function: Callable[..., Any], tensors: Tensors, frozen: tuple[str, ...]) -> Tensors:
    """Outputs and gradients by name, from copies of the inputs."""
    leaves = _leaves(tensors, frozen, copy=True)
    # an addition in between, so that what works in place does not meet a leaf
    outs = _outputs(function, {k: x + 0 if x.requires_grad else x for k, x in leaves.items()})
    results = {f"output {i}": out.detach().clone() for i, out in enumerate(outs)}
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    gradients = torch.autograd.grad(outs, list(wanted.values()), _upstream(outs))
    return results | {f"gradient of {name}": g.detach() for name, g in zip(wanted, gradients, strict=True)}


def _build(
    make: Callable[[], Tensors],
    entries: Callable[[], tuple[dict[str, Entry], dict[str, str]]],
    frozen: tuple[str, ...],
    dtype: str,
    backward: bool,
) -> Bench:
    known, absent = entries()
    inputs = make()

    @cache
    def measures() -> tuple[Tensors, Tensors]:
        reference = known["reference"].function
        truth = _all(reference, {name: x.double() for name, x in inputs.items()}, frozen)
        return truth, _all(reference, inputs, frozen)

    def check(entry: Entry) -> str | None:
        truth, own = measures()
        got = _all(entry.function, inputs, frozen)
        return disagreement(
            list(truth), [got[n] for n in truth], list(truth.values()), [own[n] for n in truth], dtype
        )

    def runner(entry: Entry) -> Callable[[], object]:
        leaves = _leaves(inputs, frozen, copy=entry.in_place)
        if not backward:
            if entry.in_place:
                leaves = {name: x.detach() for name, x in leaves.items()}
            return lambda: entry.function(**leaves)
        held: dict[str, Any] = {}

        def run() -> object:
            if not held:  # the graph is made once, at the first run, which is never timed
                outs = _outputs(
                    entry.function,
                    {k: x + 0 if entry.in_place and x.requires_grad else x for k, x in leaves.items()},
                )
                held.update(outs=outs, g=_upstream(outs), x=[x for x in leaves.values() if x.requires_grad])
            return torch.autograd.grad(held["outs"], held["x"], held["g"], retain_graph=True)

        return run

    return Bench(
        {
            name: Contestant(runner(entry), lambda entry=entry: check(entry), ours=entry.ours)  # type: ignore[misc]
            for name, entry in known.items()
        },
        absent,
    )
