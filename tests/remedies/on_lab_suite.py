"""Suites of studies: what each refusal names works."""

from __future__ import annotations

from cases import case

from trimtab.lab.suite import suite_cells


def suite(name: str) -> None:
    assert suite_cells(name, device="cpu", memory_bytes=2**35)


case(
    "lab/suite.py:suite_cells: {}the suites are {}",
    lambda w: suite("all"),
    lambda w, remedy: [suite(name) for name in remedy.rpartition("the suites are ")[2].split(" and ")],
)
case(
    "cli/bench.py:bench: name a study, or use --suite study; see `trimtab bench --help`",
    lambda w: w.cli("bench"),
    lambda w, remedy: w.cli("bench", "sizes", "tiny", "--out", w.tmp / "sizes"),
)
case(
    "cli/studying.py:_time_limit: give a number above 0",
    lambda w: w.cli("bench", "--suite", "study", "--minutes", "-1"),
    lambda w, remedy: w.cli("bench", "--suite", "study", "--minutes", "1e-9", "--out", w.tmp / "suite"),
)
case(
    "cli/studying.py:_at_once: use at least 1",
    lambda w: w.cli("bench", "--suite", "study", "--device", "cpu", "--list", "--at-once", "0"),
    lambda w, remedy: w.cli("bench", "--suite", "study", "--device", "cpu", "--list", "--at-once", "1"),
)

case(
    "cli/bench.py:check_no_options: remove --suite, or remove {}",
    lambda w: w.cli("bench", "--suite", "study", "sizes"),
    lambda w, remedy: (
        w.cli("bench", "sizes", "--device", "cpu", "--out", w.tmp / "sizes"),
        w.cli("bench", "--suite", "study", "--device", "cpu", "--list"),
    ),
)
case(
    "cli/bench.py:check_no_options: write it after the study: trimtab bench {} --{} …",
    lambda w: w.cli("bench", "--list", "sizes"),
    lambda w, remedy: w.cli("bench", "sizes", "--list", "--device", "cpu"),
)
case(
    "cli/bench.py:check_no_options: {} runs alone: remove --{}",
    lambda w: w.cli("bench", "--at-once", "2", "sizes"),
    lambda w, remedy: w.cli("bench", "sizes", "--list", "--device", "cpu"),
)
case(
    "cli/bench.py:list_for_gpu: add --list, or remove --gpu",
    lambda w: w.cli("bench", "--suite", "study", "--gpu", "h200"),
    lambda w, remedy: (
        w.cli("bench", "--suite", "study", "--gpu", "h200", "--list"),
        w.cli("bench", "--suite", "study", "--device", "cpu", "--list"),
    ),
)
