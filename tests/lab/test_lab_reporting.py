"""Reports of studies: separate sections per machine, equal files, and exit codes of commands."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer
from command import call
from rich.console import Console
from sample_study import cell, make_known

from trimtab.cli.study_progress import StudyProgress, count_outcomes, has_failed
from trimtab.cli.studying import run_study
from trimtab.facts.errors import DataError, ResourceError
from trimtab.lab.reporting import build_report, read_report, write_report
from trimtab.lab.study import Cell, CellOutcome, Machine, Measurement
from trimtab.lab.sweep import RECORDS
from trimtab.report import pictures
from trimtab.report.document import LineChart
from trimtab.report.document_page import render_document

H200 = Machine("NVIDIA H200", {"torch": "2.11.0", "python": "3.12.3"})
LAPTOP = Machine("AMD Ryzen 7", {"torch": "2.13.0", "python": "3.11.7"})
NEWER = Machine("AMD Ryzen 7", {"torch": "2.14.0", "python": "3.11.7"})


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    make_known(monkeypatch, tmp_path_factory.mktemp("worker") / "packages")


def made(
    machine: Machine, value: int, outcome: CellOutcome = CellOutcome.MEASURED, **more: Any
) -> Measurement:
    result = {"value": value} if outcome is CellOutcome.MEASURED else {}
    one = Measurement(
        cell("measure", value=value), outcome, result, "", 0.5, machine, "abc", "2026-11-18T10:00:00+00:00"
    )
    return Measurement(**{**one.__dict__, **more})


def write_records(path: Path, measurements: Sequence[Measurement], *raw: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "".join(f"{json.dumps(m.to_dict())}\n" for m in measurements) + "".join(f"{r}\n" for r in raw)
    )
    return path


def test_machines_and_versions_of_torch_never_share_a_table() -> None:
    found = [made(H200, 1), made(LAPTOP, 2), made(NEWER, 3), made(H200, 4)]
    document = build_report(found, "trimtab bench sample")
    assert document.title == "A sample"
    assert document.facts == (
        "NVIDIA H200, torch 2.11.0",
        "AMD Ryzen 7, torch 2.13.0",
        "AMD Ryzen 7, torch 2.14.0",
        "commit abc",
        "2026-11-18",
    )
    assert [section.title for section in document.sections] == [
        "Values (NVIDIA H200, torch 2.11.0)",
        "Values (AMD Ryzen 7, torch 2.13.0)",
        "Values (AMD Ryzen 7, torch 2.14.0)",
    ]
    rows = [[row[2] for row in section.blocks[1].rows] for section in document.sections]
    assert rows == [["1", "4"], ["2"], ["3"]]
    ids = [
        block.id for section in document.sections for block in section.blocks if isinstance(block, LineChart)
    ]
    assert ids == [
        "values-h200-torch-2-11-0",
        "values-amd-ryzen-7-torch-2-13-0",
        "values-amd-ryzen-7-torch-2-14-0",
    ]
    assert "<!doctype html>" in render_document(document)


def test_one_machine_is_named_once() -> None:
    later = {"commit": "def", "time": "2026-11-20T10:00:00+00:00"}
    document = build_report([made(H200, 1), made(H200, 2, **later)], "x", "My title")
    assert document.title == "My title"
    assert document.facts == ("NVIDIA H200, torch 2.11.0", "commits abc, def", "2026-11-18 to 2026-11-20")
    assert [section.title for section in document.sections] == ["Values"]
    unknown = build_report([made(H200, 1, commit="unknown")], "x")
    assert unknown.facts == ("NVIDIA H200, torch 2.11.0", "2026-11-18")
    assert build_report([], "x").sections == ()


def test_charts_of_one_id_get_numbers() -> None:
    odd = Machine("AMD Ryzen-7", {"torch": "2.13.0"})
    document = build_report([made(LAPTOP, 1), made(odd, 2)], "x")
    ids = [
        block.id for section in document.sections for block in section.blocks if isinstance(block, LineChart)
    ]
    assert ids == ["values-amd-ryzen-7-torch-2-13-0", "values-amd-ryzen-7-torch-2-13-0-2"]


def test_the_files_of_a_report(tmp_path: Path) -> None:
    written = write_report(
        build_report([made(H200, 1), made(H200, 2)], "trimtab bench sample"), tmp_path / "new"
    )
    assert [path.relative_to(tmp_path / "new").as_posix() for path in written] == [
        "report.md",
        "report.html",
        "pictures/values.png",
    ]
    assert "![Values](pictures/values.png)" in written[0].read_text()
    assert written[2].read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_everything_else_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "can_draw", lambda: False)
    write_records(tmp_path / RECORDS, [made(H200, 1), made(H200, 2)])
    code, said = call("bench", "report", tmp_path)
    assert code == 0
    assert said.count("pip install 'trimtab[lab]'") == 1
    assert not (tmp_path / "pictures").exists()
    assert "| cell | value |" in (tmp_path / "report.md").read_text(), "the chart's values in its place"


def test_an_unwritable_target(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    document = build_report([made(H200, 1)], "x")
    with pytest.raises(ResourceError, match="give another place with --out"):
        write_report(document, tmp_path / "file")
    write_records(tmp_path / RECORDS, [made(H200, 1)])
    code, said = call("bench", "report", tmp_path, "--out", tmp_path / "file" / "deep")
    assert code == 6
    assert "cannot be written" in said


def test_the_command_writes_the_report_from_records(tmp_path: Path) -> None:
    first = write_records(tmp_path / "a" / RECORDS, [made(H200, 1)], "{torn")
    second = write_records(tmp_path / "b.jsonl", [made(LAPTOP, 2, CellOutcome.OUT_OF_MEMORY)])
    code, said = call("bench", "report", first.parent)
    assert code == 0
    assert "1 damaged line left out" in said
    assert "1 cell: 1 measured" in said
    assert (tmp_path / "a" / "report.html").exists()

    code, said = call("bench", "report", first, second, "--out", tmp_path / "both")
    assert code == 0
    assert "2 cells: 1 measured, 1 out of memory" in said
    text = (tmp_path / "both" / "report.md").read_text()
    assert "## Values (NVIDIA H200, torch 2.11.0)" in text
    assert "out of memory" in text

    code, said = call("bench", "report", first.parent, "--json")
    records = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert [record["result"] for record in records] == [{"value": 1}]


def test_records_that_cannot_be_reported(tmp_path: Path) -> None:
    future = write_records(tmp_path / "f" / RECORDS, [made(H200, 1)])
    future.write_text(future.read_text().replace('"sample"', '"teleport"'))
    code, said = call("bench", "report", future)
    assert code == 3
    assert "records of teleport, a study that this version of trimtab does not have" in said
    assert "sizes" in said
    code, said = call("bench", "report", tmp_path / "nowhere")
    assert (code, "cannot be read" in said) == (3, True)
    (tmp_path / "notes.txt").write_text("nothing of the kind")
    code, said = call("bench", "report", tmp_path / "notes.txt")
    assert (code, "has no measurements" in said) == (3, True)
    code, _ = call("bench", "report")
    assert code == 2


def test_records_with_other_fields_are_of_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_records(tmp_path / RECORDS, [made(H200, 1)])
    import sample_study

    old = sample_study.STUDY.__class__("sample", "A sample", lambda found: [found[0].result["renamed"]], "")
    monkeypatch.setattr("trimtab.lab.reporting.find_study", lambda name: old)
    with pytest.raises(DataError, match="another version of trimtab: KeyError: 'renamed'"):
        read_report([tmp_path], "x")


def study(cells: list[Cell], folder: Path, **options: Any) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of a study's command."""
    out, err = io.StringIO(), io.StringIO()
    settings = {"device": "cpu", "out": folder, "remeasure": False, "as_json": False, **options}
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run_study("sample", cells, **settings)
        except typer.Exit as ended:
            return ended.exit_code, out.getvalue(), err.getvalue()
    return 0, out.getvalue(), err.getvalue()


def test_a_study_as_a_command(tmp_path: Path) -> None:
    cells = [cell("measure", value=1), cell("refuse"), cell("allocate")]
    code, out, err = study(cells, tmp_path, command="trimtab numerics sample")
    assert code == 0, "running out of memory is a result"
    said = err.splitlines()
    assert said[0].startswith("[1/3] sample measure 1 (")
    assert said[1].startswith("[2/3] sample refuse: not supported: fp8 needs capability 8.9 (")
    assert said[2].startswith("[3/3] sample allocate: out of memory")
    assert said[3] == "3 cells: 1 measured, 1 out of memory, 1 not supported"
    assert said[4].startswith(f"wrote {tmp_path / 'report.md'}, {tmp_path / 'report.html'}, 1 picture in ")
    assert "Written by `trimtab numerics sample`." in out

    code, out, err = study([*cells, cell("fail")], tmp_path)
    assert code == 1
    said = err.splitlines()
    assert said[0].startswith("[4/4] sample fail: failed: ValueError: no such backend (")
    assert "(3 recorded before; --remeasure measures them again)" in said[1]
    assert "Written by `trimtab bench sample`." in out

    code, out, err = study(cells[:1], tmp_path, as_json=True)
    assert (code, json.loads(out)["result"]["value"]) == (0, 1)


def test_a_folder_that_cannot_be_written_stops_a_study_before_it_measures(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="give another place with --out"):
        study([cell("measure")], tmp_path / "file")


@pytest.mark.parametrize("again", [False, True])
def test_an_interrupted_study_explains_how_to_resume(tmp_path: Path, again: bool) -> None:
    pids = tmp_path / "pids"

    def interrupt() -> None:
        while not pids.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    cells = [cell("measure", value=1), cell("sleep", pids=str(pids))]
    with pytest.raises(KeyboardInterrupt) as caught:
        study(cells, tmp_path, remeasure=again)
    same = "the same command without --remeasure" if again else "the same command"
    assert str(caught.value) == f"stopped after 1 of 2 cells; {same} continues with the next"


def test_an_interrupted_command_ends_with_130(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stop(*words: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trimtab.lab.sweep.run_sweep", stop)
    code, said = call("bench", "sizes", "--out", tmp_path, "--device", "cpu")
    assert code == 130
    assert "error: stopped after 0 of" in said
    assert "the same command continues" in said


def test_progress_on_a_terminal_shows_the_cell_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("trimtab.cli.study_progress.time.monotonic", lambda: clock[0])
    console = Console(
        file=StringIO(),
        force_terminal=True,
        width=100,
        color_system=None,
        legacy_windows=False,
        _environ={"TERM": "xterm"},
    )
    with StudyProgress(4, console) as progress:
        progress(1, 4, cell("measure", value=0), made(H200, 0))
        assert progress.left() is None, "a recorded cell says nothing of the time"
        one = cell("measure", value=1)
        progress(1, 4, one, None)
        clock[0] += 10.0
        progress(2, 4, one, made(H200, 1))
        assert progress.left() == 20.0
        progress._bar.refresh()
        bad = cell("[bold]fail\x1b[31m")
        progress(2, 4, bad, None)
        progress(3, 4, bad, made(H200, 2, CellOutcome.FAILED, message="why\nnot [/red]"))
    shown = console.file.getvalue()
    assert "sample measure 1" in shown
    assert "2/4" in shown
    assert "20.0 s left" in shown
    assert "[3/4] sample [bold]fail\\x1b[31m: failed: why⏎not [/red]" in shown
    assert (progress.done, progress.recorded) == (3, 1)


def test_progress_of_preparations(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("trimtab.cli.study_progress.time.monotonic", lambda: clock[0])
    plain, terminal = Console(file=StringIO(), width=100), Console(
        file=StringIO(), force_terminal=True, width=100, color_system=None, legacy_windows=False,
        _environ={"TERM": "xterm"},
    )  # fmt: skip
    for console in (plain, terminal):
        with StudyProgress(3, console) as progress:
            progress.preparing(0, 2, None)
            clock[0] += 6.0
            progress.preparing(1, 2, cell("measure", value=7))
            if progress._bar is not None:
                progress._bar.refresh()
            one = cell("measure", value=1)
            progress(0, 3, one, None)
            progress(1, 3, one, made(H200, 1))
            assert progress.left() == 12.0, "time of preparations counts"
    assert "[compiled 1/2] sample measure 7" in plain.file.getvalue()
    assert "compiling for 2 cells, 1 done" in terminal.file.getvalue()


def test_sections_of_several_studies_name_their_study() -> None:
    other = Measurement(
        Cell("sizes", {"size": "small"}),
        CellOutcome.FAILED,
        {},
        "why",
        0.1,
        H200,
        "abc",
        "2026-11-18T10:00:00",
    )
    alone, both = (build_report(found, "x") for found in ([made(H200, 1)], [made(H200, 1), other]))
    assert [section.title for section in alone.sections] == ["Values"]
    assert {section.title for section in both.sections} == {"sample: Values", "sizes: Values"}


def test_the_commit_of_a_machine_without_git_is_recorded(tmp_path: Path) -> None:
    study([cell("measure", value=1)], tmp_path, commit="0123456789")
    assert json.loads((tmp_path / RECORDS).read_text())["commit"] == "0123456789"


def test_counts_and_codes() -> None:
    found = [made(H200, 1), made(H200, 2, CellOutcome.OUT_OF_MEMORY), made(H200, 3, CellOutcome.TIMED_OUT)]
    assert count_outcomes(found) == "3 cells: 1 measured, 1 out of memory, 1 timed out"
    assert has_failed(found)
    assert not has_failed(found[:2])
