"""Calibration files and calibrating: what each refusal names works."""

from __future__ import annotations

from cases import World, case

from trimtab.facts.calibration import Calibration
from trimtab.facts.calibration_file import read_calibration, write_calibration
from trimtab.lab.calibrate import calibrate

MADE = Calibration("a CPU", flops={"fp32": 1e11}, copy=2e10, launch_seconds=5e-6, threads=1)


def onto_a_file(w: World) -> None:
    (w.tmp / "taken").write_text("no folder")
    write_calibration(MADE, w.tmp / "taken")


def into_a_folder(w: World, remedy: str) -> None:
    write_calibration(MADE, w.tmp / "cache")
    assert read_calibration("a CPU", 1, folder=w.tmp / "cache") == MADE


case(
    "facts/calibration_file.py:write_calibration: set XDG_CACHE_HOME to a writable folder",
    onto_a_file,
    into_a_folder,
)


def with_one_thread(w: World, remedy: str) -> None:
    found = calibrate("cpu", threads=1, folder=w.tmp, seconds=2.0)
    assert found.threads == 1
    assert found.copy > 0


case("lab/calibrate.py:calibrate: give at least 1", lambda w: calibrate("cpu", threads=0), with_one_thread)
