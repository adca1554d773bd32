"""Plans every case without running it: for GPU cases torch.cuda is patched to report an H200, so no GPU is needed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

from tools.sameness.case import Case
from tools.sameness.sets import base_of

H200_BYTES = 139 * 2**30


def pretended_gpu() -> AbstractContextManager[object]:
    """Patch torch.cuda to report an H200 to the planner."""
    import torch

    return patch.multiple(
        torch.cuda,
        is_available=lambda: True,
        is_initialized=lambda: False,
        device_count=lambda: 1,
        mem_get_info=lambda *_: (H200_BYTES, H200_BYTES),
        memory_reserved=lambda *_: 0,
        get_device_capability=lambda *_: (9, 0),
        get_device_name=lambda *_: "NVIDIA H200",
        current_device=lambda: 0,
        get_device_properties=lambda *_: SimpleNamespace(is_integrated=False, uuid=None),
    )


def plan_all(device: str, cases: Sequence[Case], world: Path) -> int:
    """Print the plan of each case; returns 1 if a recipe is rejected."""
    import torch

    import trimtab

    pretend = device == "cuda" and not torch.cuda.is_available()
    refused = 0
    with pretended_gpu() if pretend else nullcontext():
        for case in cases:
            try:
                plan = trimtab.plan_run(case.recipe(base_of(device), world))
            except trimtab.TrimtabError as error:
                refused += 1
                print(f"REFUSED {case.name}: {error}")
                continue
            chosen = plan["choices"]
            graphs = "graphs" if chosen["graphs"]["on"] else "no graphs"
            print(f"{case.name}: {chosen['attention']['impl']}, {graphs}, loss {chosen['loss']['impl']}")
    print(f"{len(cases) - refused} of {len(cases)} recipes planned")
    return 1 if refused else 0
