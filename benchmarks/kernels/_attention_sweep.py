"""Times many tile sizes of the Triton attention kernels on this device; the values in `tiles.py` come from it.

    python -m benchmarks.kernels._attention_sweep [--warm N] [--head-dim D] [--out FILE.json]

`--warm` first compiles all variants in N processes, into Triton's own cache.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.attention import SHAPES, Inputs, Shape
from trimtab.kernels.attention import launch_triton
from trimtab.kernels.attention.launch_triton import NO_WINDOW, KernelArguments
from trimtab.kernels.attention.tiles import Tiles, tiles
from trimtab.lab.timing import time_together

PACKED_256 = Shape("packed 4x4096, 16/8 heads of 256", 4, 4096, 16, 8, 256, packed=True)
# (rows, keys, warps, stages); a fifth value 0 loads through pointers instead of TMA descriptors
WIDE = {
    "forward": [(64, 64, 4, 3), (64, 32, 4, 4), (128, 32, 4, 4), (128, 64, 4, 2)],
    "query": [(64, 64, 4, 2), (64, 32, 4, 3), (64, 32, 4, 4), (128, 64, 8, 3)],
    "key": [(64, 64, 4, 2), (32, 64, 4, 3), (32, 64, 4, 4), (64, 128, 8, 3)],
}
NARROW = {
    "forward": [(64, 64, 4, 3), (64, 64, 4, 4), (64, 64, 4, 2), (64, 32, 4, 4)],
    "query": [(64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 4, 4)],
    "key": [(64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 4)],
}
# Of 130 variants for heads of 256, the ones that fit the shared memory of Hopper and, as compiled for it, spill less
# than 256 bytes per thread.
BROAD = {
    "forward": [
        *((128, 64, 8, 2), (128, 32, 8, 2), (128, 32, 8, 3), (128, 32, 8, 4), (64, 64, 4, 2), (64, 64, 4, 3)),
        *((64, 64, 8, 2), (64, 64, 8, 3), (64, 32, 4, 3), (64, 32, 4, 4), (64, 32, 8, 4)),
    ],
    "query": [
        *((64, 64, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 4, 3), (64, 32, 4, 4), (64, 32, 8, 3)),
        *((64, 32, 8, 4), (128, 32, 8, 2), (128, 32, 8, 3)),
    ],
    "key": [
        *((32, 64, 8, 2), (32, 64, 8, 3), (64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 8, 3), (32, 32, 8, 2)),
        *((32, 32, 8, 3), (32, 32, 4, 3)),
    ],
}
VARIANTS = {64: NARROW, 128: WIDE, 256: BROAD}
"""The tiles to time, by head size."""


class Runner:
    """Runs each kernel of one shape with any tiles."""

    def __init__(self, shape: Shape) -> None:
        inputs = Inputs(shape)
        self.shape = shape
        self.qkv = [x.detach() for x in inputs.leaves]
        self.grad = inputs.grad_BTHD
        self.bounds = inputs.layout.prepare("triton", "cuda", shape.T)
        self.arguments = KernelArguments(NO_WINDOW, shape.D**-0.5, 0.0, True)
        self.default = {
            name: tiles(name, shape.D, 2, 90, packed=shape.packed) for name in ("forward", "query", "key")
        }
        self.o, self.lse = self.forward(self.default["forward"])

    def forward(self, chosen: Tiles) -> Any:
        return launch_triton.forward(*self.qkv, self.bounds.first_BT, self.arguments, with_tiles=chosen)

    def gradient(self, name: str, chosen: Tiles) -> Any:
        both = self.default | {name: chosen}
        first, last = self.bounds.first_BT, self.bounds.last_BT
        pair = both["query"], both["key"]
        return launch_triton.backward(
            self.grad, *self.qkv, self.o, self.lse, first, last, self.arguments, with_tiles=pair
        )

    def run(self, name: str, variant: tuple[int, ...]) -> Any:
        """Launches the forward kernel with these tiles, or both backward kernels, one of them with these tiles."""
        chosen = Tiles(*variant[:4])
        described = launch_triton._supports_tma
        if len(variant) > 4:
            launch_triton._supports_tma = lambda x: False
        try:
            return self.forward(chosen) if name == "forward" else self.gradient(name, chosen)
        finally:
            launch_triton._supports_tma = described


def jobs(head_dims: Sequence[int]) -> list[tuple[Shape, str, tuple[int, ...]]]:
    """All variants of the shapes with these head sizes."""
    return [
        (shape, name, variant)
        for shape in (*SHAPES, PACKED_256)
        if shape.D in head_dims
        for name, variants in VARIANTS[shape.D].items()
        for variant in variants
    ]


def _compile(job: tuple[Shape, str, tuple[int, ...]]) -> str | None:
    shape, name, variant = job
    try:
        Runner(shape).run(name, variant)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - a variant that does not compile is skipped
        return f"{shape.name} {name} {variant}: {str(error)[:200]}"
    return None


def main() -> None:
    """Prints milliseconds by shape, kernel and tiles; a backward time is that of both kernels."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--warm", type=int, default=0)
    parser.add_argument("--head-dim", type=int, action="append", choices=list(VARIANTS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    every = jobs(options.head_dim or list(VARIANTS))
    left_out: set[Any] = set()
    if options.warm:
        with multiprocessing.get_context("spawn").Pool(options.warm) as pool:
            for job, complaint in zip(every, pool.map(_compile, every, chunksize=1), strict=True):
                if complaint:
                    print(complaint)
                    left_out.add(job)
    results: list[dict[str, Any]] = []
    for shape in dict.fromkeys(job[0] for job in every):
        runner = Runner(shape)
        for name in ("forward", "query", "key"):
            mine = [j[2] for j in every if j[:2] == (shape, name) and j not in left_out]
            true = runner.run(name, tuple(vars(runner.default[name]).values()))
            for variant in mine:
                for x, y in zip(runner.run(name, variant), true, strict=True):
                    off = float((x.float() - y.float()).abs().max())
                    assert off < 0.1 * max(1.0, float(y.float().abs().max())), (
                        shape.name,
                        name,
                        variant,
                        off,
                    )
            runs = {str(v): functools.partial(runner.run, name, v) for v in mine}
            times = time_together(runs, rounds=3, budget_ms=25)
            for variant, timing in sorted(times.items(), key=lambda item: item[1].median_ms):
                print(f"{shape.name:36} {name:8} {variant:22} {timing.median_ms:.4f}", flush=True)
                results.append(
                    {"shape": shape.name, "kernel": name, "tiles": variant, "ms": timing.median_ms}
                )
    if options.out:
        options.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
