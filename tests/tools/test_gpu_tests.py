"""`python -m tools.gpu_tests`: results are recorded as tests end, and a second call runs only what is missing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools import gpu_tests
from trimtab.lab.records import read_records

TESTS = """
import os
import time
from pathlib import Path

import pytest

CALLS = Path(os.environ["CALLS_OF_TESTS"])


def count(name):
    with CALLS.open("a") as file:
        file.write(name + "\\n")


@pytest.fixture
def closing():
    yield
    assert not CALLS.with_name("broken").exists(), "broken when closed"


def test_passes():
    count("passes")


def test_is_skipped():
    count("is skipped")
    pytest.skip("no such kernel")


def test_fails_when_closed(closing):
    count("fails when closed")


@pytest.mark.alone
def test_takes_long():
    count("takes long")
    time.sleep(60 if CALLS.with_name("slow").exists() else 0)
"""


@pytest.fixture
def tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A test file whose tests count their calls."""
    monkeypatch.setenv("CALLS_OF_TESTS", str(tmp_path / "calls"))
    file = tmp_path / "test_some.py"
    file.write_text(TESTS)
    return file


def command(tests: Path, commit: str = "abc") -> list[str]:
    out = tests.with_name("out.jsonl")
    return [str(tests), "--out", str(out), "--commit", commit, "--marks", "not gpu", "--workers", "1"]


def run(tests: Path, *words: str, commit: str = "abc") -> int:
    return gpu_tests.main([*command(tests, commit), *words])


def calls(tests: Path) -> list[str]:
    file = tests.with_name("calls")
    return sorted(file.read_text().splitlines()) if file.exists() else []


def test_results_are_recorded_and_only_failed_tests_repeated(
    tests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tests.with_name("broken").touch()
    assert run(tests) == 1
    found = read_records(tests.with_name("out.jsonl"), "test")
    outcomes = {name.rsplit("::", 1)[1]: one["outcome"] for name, one in found.items()}
    assert outcomes == {
        "test_passes": "passed",
        "test_is_skipped": "skipped",
        "test_fails_when_closed": "failed",
        "test_takes_long": "passed",
    }
    reasons = {name.rsplit("::", 1)[1]: one.get("reason", "") for name, one in found.items()}
    assert "no such kernel" in reasons["test_is_skipped"]
    assert "broken when closed" in reasons["test_fails_when_closed"]
    assert {one["commit"] for one in found.values()} == {"abc"}
    printed = capsys.readouterr().out
    assert "2 passed" in printed
    assert "test_fails_when_closed: AssertionError: broken when closed" in printed
    tests.with_name("broken").unlink()
    assert run(tests) == 0
    assert calls(tests) == ["fails when closed"] * 2 + ["is skipped", "passes", "takes long"]
    assert run(tests, commit="another") == 0  # another commit runs them all
    assert calls(tests).count("passes") == 2


def test_an_interrupted_command_keeps_what_ended(tests: Path) -> None:
    tests.with_name("slow").touch()
    words = [sys.executable, "-m", "tools.gpu_tests", *command(tests)]
    process = subprocess.Popen(words, cwd=gpu_tests.ROOT, stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + 240
    while "takes long" not in calls(tests) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    printed = process.communicate()[0]
    assert process.returncode == 1
    assert "1 of 4 tests have no result; the same command continues" in printed
    tests.with_name("slow").unlink()
    assert run(tests) == 0
    assert calls(tests).count("passes") == 1


def test_without_time_no_process_is_started(tests: Path) -> None:
    tests.with_name("slow").touch()
    assert run(tests, "--seconds", "1") == 1  # less than a process needs to start: none is started
    assert calls(tests) == []


def test_no_selected_test_is_an_error(tests: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tests, "--marks", "gpu") == 2
    assert "no test has the marks 'gpu'" in capsys.readouterr().err


def test_tests_that_import_their_neighbours_are_collected(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    words = ["tests/adapt/test_quantized_model.py", "--out", str(out), "--commit", "abc", "--workers", "1"]
    assert gpu_tests.main([*words, "--marks", "gpu"]) == 0
    assert all(name.startswith("tests/adapt/test_quantized_model.py::") for name in read_records(out, "test"))


def test_a_file_that_cannot_be_imported_is_named(tests: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tests.with_name("test_broken.py").write_text("import no_such_package\n")
    assert gpu_tests.main([str(tests.with_name("test_broken.py")), *command(tests)]) == 1
    printed = capfd.readouterr().err
    assert "No module named 'no_such_package'" in printed
    assert "error: pytest ended with exit code" in printed
