"""Finds the fastest launch configuration of the 8-bit AdamW kernel, over one step of Qwen3-0.6B's tensors.

    python -m benchmarks.adamw8bit_configurations

Needs a CUDA device and about half a minute, most of it compiling. Prints milliseconds and the
bandwidth relative to a copy. `trimtab.kernels.adamw8bit.spec.configuration` returns the chosen one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.kernels.adamw8bit import cases, parameters, shapes
from trimtab.kernels.adamw8bit import new_state
from trimtab.kernels.adamw8bit.spec import MIN_8BIT_SIZE, Configuration
from trimtab.kernels.adamw8bit.table import Member, ParameterTable
from trimtab.lab.timing import ceilings, time_together

CANDIDATES = [
    Configuration(blocks, times, warps, stages)
    for blocks, warps in ((2, 2), (4, 4), (2, 1), (1, 1))
    for times, stages in ((1, 1), (8, 1), (8, 2), (8, 3), (8, 4), (16, 2), (16, 3), (32, 2), (32, 3))
]


def members() -> tuple[list[Member], list[torch.Tensor | None]]:
    """Every tensor with its state, and the gradients."""
    params = parameters(shapes(), seed=0)
    found = []
    for index, p in enumerate(params):
        if p.numel() >= MIN_8BIT_SIZE:
            found.append(Member(p.detach(), new_state(p), index))
        else:
            zeros = torch.zeros_like(p, dtype=torch.float32)
            found.append(Member(p.detach(), (zeros, zeros.clone()), index))
    return found, [p.grad for p in params]


def main() -> None:
    """Measure and print."""
    all_members, grads = members()
    rates, decay = [1e-4] * len(grads), [0.1] * len(grads)
    scale = torch.ones((), device="cuda")

    def step_of(config: Configuration, exact: bool = False) -> Callable[[], None]:
        table, count = ParameterTable(all_members, exact, config), [0]

        def step() -> None:
            count[0] += 1
            table.step(
                grads, lr=rates, weight_decay=decay, beta1=0.9, beta2=0.999, eps=1e-8, step=count[0],
                grad_scale=scale,
            )  # fmt: skip

        return step

    floor_ms = cases()[0].floor(ceilings()) * 1e3
    times = time_together({str(tuple(c)): step_of(c) for c in CANDIDATES}, rounds=3, budget_ms=30)
    for name, timing in sorted(times.items(), key=lambda item: item[1].median_ms):
        share = floor_ms / timing.median_ms
        print(
            f"{name:16} {timing.median_ms:7.3f} ms ({timing.low_ms:.3f}–{timing.high_ms:.3f})  {share:.0%} of copy"
        )
    best = min(CANDIDATES, key=lambda c: times[str(tuple(c))].median_ms)
    exact = time_together({"exact": step_of(best, exact=True)}, rounds=3, budget_ms=30)["exact"]
    print(f"exact, {tuple(best)}: {exact.median_ms:.3f} ms; floor {floor_ms:.3f} ms")


if __name__ == "__main__":
    main()
