"""Named sets of cells from several studies, measured in one sweep with one report.

`study` repeats the reference study with at most two seconds of timing per cell: every size, fp32 and bf16, warm-up,
kernels, memory, plain attention eager and compiled, FlashAttention over lengths. `full` measures the defaults of every
study except `claims` and `concurrency`; it takes hours. On a CPU `study` is reduced to what minutes allow.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from trimtab.facts.errors import RecipeError
from trimtab.lab.studies.attention import cells as attention
from trimtab.lab.studies.compile import cells as compiling
from trimtab.lab.studies.kernels import cells as kernels
from trimtab.lab.studies.memory import cells as memory
from trimtab.lab.studies.sizes import cells as sizes
from trimtab.lab.studies.step import cells as step
from trimtab.lab.study import Cell

SUITES = ("study", "full")
BUDGET_S = 2.0
"""Seconds of timing per cell."""
STEP_BUDGET_S = 1.5
"""The same for the steps of a GPU, ten of which take longer for the largest models only."""
SIZES = ("small", "medium", "large", "xl", "2.7B")
PLAIN_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
FLASH_LENGTHS = (256, 1024, 4096, 16384, 65536)


def suite_cells(name: str, *, device: str, memory_bytes: int) -> list[Cell]:
    """The cells of a suite, quick studies first.

    Args:
        name: one of `SUITES`.
        device: cpu, cuda or cuda:N.
        memory_bytes: total memory of the device.

    Raises:
        RecipeError: there is no such suite.

    Example:
        >>> found = suite_cells("study", device="cuda", memory_bytes=140 * 2**30)
        >>> found[0].study, len({cell.key for cell in found}) == len(found)
        ('sizes', True)
    """
    if name not in SUITES:
        near = difflib.get_close_matches(name, SUITES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise RecipeError(f"there is no suite {name!r}", f"{hint}the suites are {' and '.join(SUITES)}")
    if name == "full":
        cells = _full(device, memory_bytes)
    elif device.startswith("cuda"):
        cells = _study_on_gpu(device, memory_bytes)
    else:
        cells = _study_on_cpu(device, memory_bytes)
    return list({cell.key: cell for cell in cells}.values())


def _full(device: str, memory_bytes: int) -> Iterator[Cell]:
    kind = device.split(":")[0]
    yield from sizes.cells()
    yield from step.cells(device=device, precisions=("fp32", "bf16"))
    yield from step.cells(device=device, warm_up=(0, 1, 2, 5))
    yield from kernels.cells(device=device)
    yield from memory.cells(device=device)
    yield from compiling.cells(device=device)
    yield from attention.cells(device=kind, memory_bytes=memory_bytes)


def _study_on_gpu(device: str, memory_bytes: int) -> Iterator[Cell]:
    kind = device.split(":")[0]
    yield from sizes.cells()
    yield from step.cells(device=device, warm_up=(0, 1, 2, 5), budget_s=STEP_BUDGET_S)
    yield from step.cells(device=device, precisions=("fp32",), losses=("logits_sum",), budget_s=STEP_BUDGET_S)
    yield from step.cells(
        device=device,
        contexts=(128, 1024),
        precisions=("bf16",),
        losses=("logits_sum",),
        budget_s=STEP_BUDGET_S,
    )
    for precision in (
        "fp32",
        "tf32",
        "bf16",
    ):  # the training loss, trimtab's own kernels, and TF32, once per size
        yield from step.cells(
            device=device, contexts=(512,), precisions=(precision,), kernels=("reference", "fast"),
            losses=("cross_entropy",), parts=("both",), budget_s=STEP_BUDGET_S,
        )  # fmt: skip
    for mode in ("compiled", "graphs"):
        yield from step.cells(
            device=device, contexts=(512,), precisions=("bf16",), modes=(mode,), losses=("cross_entropy",),
            parts=("both",), budget_s=STEP_BUDGET_S,
        )  # fmt: skip
    yield from kernels.cells(device=device, sizes=("small", "2.7B"), rounds=2)
    yield from memory.cells(memory.Options(sizes=("small", "2.7B")), device=device)
    yield from compiling.cells(device=device, scopes=("regions",), shapes=("dynamic",))
    # Static shapes compile every length again, which two lengths show.
    yield from compiling.cells(
        device=device, methods=("full",), scopes=("regions",), shapes=("static",), lengths=(256, 192)
    )
    # The whole model is compiled once per length, which takes longest: `step` times it for every size.
    yield from compiling.cells(device=device, methods=("qlora",), scopes=("whole",), lengths=(256, 192))
    plain = attention.Options(
        ("reference",), ("fp32",), lengths=PLAIN_LENGTHS, batches=(8,), seconds=BUDGET_S
    )
    yield from attention.cells(plain, device=kind, memory_bytes=memory_bytes)
    for dtype in ("fp32", "bf16"):
        flash = attention.Options(
            dtypes=(dtype,), head_dims=(64, 128), lengths=FLASH_LENGTHS, batches=(1,), seconds=BUDGET_S,
            modes=("eager",), weighted_sum=False,
        )  # fmt: skip
        yield from attention.cells(flash, device=kind, memory_bytes=memory_bytes)


def _study_on_cpu(device: str, memory_bytes: int) -> Iterator[Cell]:
    yield from sizes.cells()
    yield from step.cells(device=device, contexts=(128,), budget_s=BUDGET_S)
    yield from step.cells(device=device, warm_up=(0, 1, 2, 5), budget_s=BUDGET_S)
    yield from kernels.cells(device=device, contexts=(128,))
    yield from memory.cells(memory.Options(precisions=("fp32",)), device=device)
    yield from compiling.cells(device=device, sizes=("tiny",))
    some = attention.Options(
        ("reference", "sdpa_math", "sdpa_flash"), ("fp32",), (16, 64), (256, 512, 1024, 2048), (8,),
        seconds=BUDGET_S,
    )  # fmt: skip
    yield from attention.cells(some, device=device, memory_bytes=memory_bytes)
