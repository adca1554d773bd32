"""Options of `trimtab bench compile`: what each refusal names works."""

from __future__ import annotations

from cases import World, case, listed

from trimtab.lab.compile_data import CompileLog
from trimtab.lab.studies.compile.cells import cells
from trimtab.lab.studies.compile.results import CompileResult

PLACE = "lab/studies/compile/cells.py"


def one_or_the_other(w: World, remedy: str) -> None:
    assert remedy == "use --shapes dynamic or --scopes whole"
    assert cells(device="cpu", scopes=["regions"], shapes=["dynamic"])
    assert cells(device="cpu", scopes=["whole"], shapes=["auto"])


def one_of_those(w: World, remedy: str) -> None:
    for precision in listed(remedy, "choose from"):
        assert cells(device="cpu", precision=precision)


case(
    f"{PLACE}:cells: use --shapes dynamic or --scopes whole",
    lambda w: cells(device="cpu", scopes=["regions"], shapes=["auto"]),
    one_or_the_other,
)
case(f"{PLACE}:_precision: choose from {{}}", lambda w: cells(device="cpu", precision="fp8"), one_of_those)
case(
    f"{PLACE}:_check_lengths: use at most {{}}",
    lambda w: cells(device="cpu", lengths=[10**6]),
    lambda w, remedy: cells(device="cpu", lengths=[int(remedy.rsplit(None, 1)[-1])]),
)


def measured_again(w: World, remedy: str) -> None:
    log = CompileLog(1, 1.0, (), ())
    assert CompileResult.from_dict(CompileResult(log, (), 8, 1.0, 1.0).to_dict()).cold == log


case(
    "lab/compile_data.py:CompileLog.from_dict: measure it again with --remeasure",
    lambda w: CompileLog.from_dict({}),
    measured_again,
)
case(
    "lab/studies/compile/results.py:CompileResult.from_dict: measure it again with --remeasure",
    lambda w: CompileResult.from_dict({}),
    measured_again,
)
