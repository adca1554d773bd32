"""Options of `trimtab bench kernels`: what each refusal names works."""

from __future__ import annotations

from pathlib import Path

from cases import World, case

from trimtab.lab.profile_data import Profile
from trimtab.lab.studies.kernels.cells import cells
from trimtab.lab.studies.kernels.results import KernelsResult

PLACE = "lab/studies/kernels/cells.py"


def either(w: World, remedy: str) -> None:
    assert remedy == "use --nvtx or --trace"
    assert cells(device="cpu", nvtx=True)
    assert cells(device="cpu", trace=Path("traces"))


case(
    f"{PLACE}:cells: use --nvtx or --trace",
    lambda w: cells(device="cpu", nvtx=True, trace=Path("x")),
    either,
)


def measured_again(w: World, remedy: str) -> None:
    (cell,) = cells(device="cpu", sizes=["tiny"], contexts=[8], kernels=["fast"], batch=1, rounds=1)
    from trimtab.lab.studies.kernels.measure import measure

    result = measure(dict(cell.settings))
    assert KernelsResult.from_dict(result).profiles
    assert Profile.from_dict(result["profiles"]["forward"]).entries


case(
    "lab/profile_data.py:Profile.from_dict: measure it again with --remeasure",
    lambda w: Profile.from_dict({}),
    measured_again,
)
case(
    "lab/studies/kernels/results.py:KernelsResult.from_dict: measure it again with --remeasure",
    lambda w: KernelsResult.from_dict({}),
    measured_again,
)
