"""Builds a forward and a backward case for a differentiable operation from the inputs of its spec."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from trimtab.lab.contests import Candidates, Contest, Implementation, disagreement, floor

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Entry:
    """An implementation: maps inputs by name to one or several tensors."""

    function: Callable[..., Any]
    ours: bool = False
    in_place: bool = False
    """Whether it overwrites inputs or gradients; it then gets copies of the inputs."""


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile with static shapes; the backward can be run repeatedly."""
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
) -> list[Contest]:
    """The cases "name, forward" and "name, backward".

    Args:
        make: Returns the inputs on the GPU.
        entries: Returns the implementations, including "reference", and the absent ones with the reason; called when
            a case is built.
        bytes_moved: Bytes moved by the forward (False) or the backward (True) pass.
        frozen: Inputs that require no gradient.
    """
    return [
        Contest(
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
    # the addition makes non-leaf tensors, which in-place operations may modify
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
) -> Candidates:
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
        graph: dict[str, Any] = {}

        def run() -> object:
            if not graph:  # built once, in the first run, which is not timed
                outs = _outputs(
                    entry.function,
                    {k: x + 0 if entry.in_place and x.requires_grad else x for k, x in leaves.items()},
                )
                graph.update(outs=outs, g=_upstream(outs), x=[x for x in leaves.values() if x.requires_grad])
            return torch.autograd.grad(graph["outs"], graph["x"], graph["g"], retain_graph=True)

        return run

    return Candidates(
        {
            name: Implementation(runner(entry), lambda entry=entry: check(entry), ours=entry.ours)  # type: ignore[misc]
            for name, entry in known.items()
        },
        absent,
    )
