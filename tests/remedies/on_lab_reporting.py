"""Records and reports of studies: what each refusal names works."""

from __future__ import annotations

import json
import re
from pathlib import Path

from cases import World, case, listed

from trimtab.lab import reporting
from trimtab.lab.reporting import build_report, prepare_folder, read_report, write_report
from trimtab.lab.study import Cell, CellOutcome, Machine, Measurement, Study
from trimtab.lab.study_models import study_model
from trimtab.lab.sweep import RECORDS, read_measurements
from trimtab.report.document import Section

SAMPLE = Study("sizes", "Sizes", lambda found: [Section("Sizes", ())], "")


def made(study: str = "sizes") -> Measurement:
    machine = Machine("a CPU", {"torch": "2.13.0"})
    cell = Cell(study, {"size": "small"})
    return Measurement(cell, CellOutcome.MEASURED, {}, "", 0.1, machine, "abc", "2026-11-18T10:00:00+00:00")


def write_records(folder: Path, study: str = "sizes") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / RECORDS).write_text(json.dumps(made(study).to_dict()) + "\n")
    return folder


def folder_that_is_named(w: World, remedy: str) -> None:
    (name,) = re.findall(r"folder with (\S+?)(?:,|$)", remedy)
    assert (write_records(w.tmp / "lab") / name).exists()
    assert len(read_measurements([w.tmp / "lab"])[0]) == 1
    assert len(read_measurements([w.tmp / "lab" / name])[0]) == 1


def empty_folder(w: World) -> None:
    (w.tmp / "empty").mkdir()
    read_measurements([w.tmp / "empty"])


case(
    "lab/sweep.py:record_files: give a folder with records.jsonl, or such a file",
    empty_folder,
    folder_that_is_named,
)
case(
    "lab/sweep.py:_read_file: give a folder with records.jsonl",
    lambda w: read_measurements([w.tmp / "missing"]),
    folder_that_is_named,
)


def file_without_records(w: World) -> None:
    (w.tmp / "notes.txt").write_text("no records")
    read_measurements([w.tmp / "notes.txt"])


def run_what_it_names(w: World, remedy: str) -> None:
    words = remedy.partition(": trimtab ")[2].split()
    w.cli(*words, "small", "--device", "cpu", "--out", w.tmp / "lab")
    w.cli("bench", "report", w.tmp / "lab")


case(
    "lab/sweep.py:_read_file: run a study first: trimtab bench sizes", file_without_records, run_what_it_names
)


def known_studies(w: World, remedy: str) -> None:
    w.patch.setattr(reporting, "find_study", lambda name: SAMPLE)
    for name in listed(remedy, "of these studies:"):
        assert build_report([made(name)], "x").sections


case(
    "lab/reporting.py:build_report: give records of these studies: {}",
    lambda w: build_report([made("teleport")], "x"),
    known_studies,
)


def records_of_another_version(w: World) -> None:
    study = Study("sizes", "Sizes", lambda found: [found[0].result["renamed"]], "")
    w.patch.setattr(reporting, "find_study", lambda name: study)
    read_report([write_records(w.tmp / "old")], "x")


def measured_by_this_version(w: World, remedy: str) -> None:
    assert "another --out" in remedy
    w.patch.setattr(reporting, "find_study", lambda name: SAMPLE)
    read_report([write_records(w.tmp / "new")], "x")


case(
    "lab/reporting.py:read_report: measure again with this version and another --out",
    records_of_another_version,
    measured_by_this_version,
)


def into_a_file(w: World) -> None:
    (w.tmp / "file").write_text("")
    prepare_folder(w.tmp / "file" / "lab")


def into_another_place(w: World, remedy: str) -> None:
    prepare_folder(w.tmp / "lab")
    w.patch.setattr(reporting, "find_study", lambda name: SAMPLE)
    assert write_report(build_report([made()], "x"), w.tmp / "lab")


case("lab/reporting.py:_unwritable: give another place with --out", into_a_file, into_another_place)


def whole_record(w: World, remedy: str) -> None:
    assert Measurement.from_dict(made().to_dict()) == made()


case(
    "lab/study.py:Measurement.from_dict: (none)",
    lambda w: Measurement.from_dict({"study": "sizes"}),
    whole_record,
)


def sizes_that_are_named(w: World, remedy: str) -> None:
    for name in listed(remedy, "the sizes are"):
        assert study_model(name).name == name


case(
    "lab/study_models.py:study_model: {}the sizes are {}", lambda w: study_model("smal"), sizes_that_are_named
)
