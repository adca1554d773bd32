"""A study for the tests of sweeps and reports: a cell's settings determine its outcome. Workers import it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.lab.study import Cell, Measurement, NotSupported, PredictedOutOfMemory, Study
from trimtab.report.document import LineChart, Section, Series, Table, Text

if TYPE_CHECKING:
    import pytest


STARTED = time.time()


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


def measure(settings: dict[str, Any]) -> Any:
    """Returns or raises what the cell's settings request."""
    do = settings["do"]
    if do == "allocate":
        return {"bytes": len(bytearray(2**46))}
    if do == "raise as torch":
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB.\nmore")
    if do == "refuse":
        raise NotSupported("fp8 needs capability 8.9")
    if do == "predict":
        raise PredictedOutOfMemory("needs 90 GiB of 80 GiB")
    if do == "fail":
        raise ValueError("no such backend\nand a second line")
    if do == "return no JSON":
        return {"value": {1, 2}}
    if do == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if do == "abort":
        os.kill(os.getpid(), signal.SIGABRT)
    if do == "exit":
        sys.exit(7)
    if do == "sleep":
        child = subprocess.Popen(["sleep", "60"])
        Path(settings["pids"]).write_text(f"{os.getpid()} {child.pid}")
        time.sleep(60)
    if do == "environment":
        return {"value": os.environ.get(settings["name"])}
    if do == "time":
        return _timed(settings)
    if do == "fail first":
        marker = Path(settings["marker"])
        if not marker.exists():
            marker.write_text("")
            raise ValueError("memory was short")
        return {"tries": 2}
    print("printed while measuring")
    return {"value": settings.get("value", 0), "process": os.getpid()}


def _timed(settings: dict[str, Any]) -> dict[str, Any]:
    """The process, when it had imported this module, and when it measured."""
    began = time.time()
    time.sleep(settings.get("seconds", 0.0))
    if "meet" in settings:  # waits until as many cells are here at the same time
        folder, end = Path(settings["place"]), began + 60
        folder.mkdir(exist_ok=True)
        (folder / str(settings["value"])).write_text("")
        while len(list(folder.iterdir())) < settings["meet"] and time.time() < end:
            time.sleep(0.02)
    place = {"process": os.getpid(), "started": STARTED, "began": began, "ended": time.time()}
    return {"value": settings["value"], **place}


def prepare(settings: dict[str, Any]) -> dict[str, Any]:
    """Compiles for a cell; with `breaks` it fails."""
    time.sleep(0.5)
    if settings.get("breaks"):
        raise ValueError("cannot be compiled")
    cached = "SAMPLE_CACHED" in os.environ
    seconds = float(os.environ.get("SAMPLE_COMPILE_SECONDS", settings["seconds_compiled"]))
    return {"compile_seconds": 0.1 if cached else seconds, "compile_cached": cached}


def cell(do: str, **settings: Any) -> Cell:
    """A cell of this study."""
    return Cell("sample", {"do": do, **settings})


def sections(measurements: Sequence[Measurement]) -> list[Section]:
    """One table and one chart."""
    rows = tuple((m.cell.name, m.outcome.value, str(m.result.get("value", "–"))) for m in measurements)
    points = tuple((float(i), m.result.get("value")) for i, m in enumerate(measurements))
    chart = LineChart("values", "Values", "cell", "value", (Series("value", points),))
    return [
        Section("Values", (Text("What was measured."), Table("", ("cell", "outcome", "value"), rows), chart))
    ]


STUDY = Study("sample", "A sample", sections, "sample_study:measure")


def make_known(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Registers the study in this process and in workers, which start immediately: their torch is an empty module."""
    from trimtab.lab import reporting, shared_phase, studies, sweep

    folder.mkdir()
    (folder / "torch.py").write_text("")
    folders = [folder, Path(__file__).parent, Path(__file__).parents[2]]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))
    monkeypatch.setitem(studies.TITLES, "sample", STUDY.title)
    for module in (sweep, shared_phase, reporting):
        monkeypatch.setattr(module, "find_study", lambda name: STUDY)
