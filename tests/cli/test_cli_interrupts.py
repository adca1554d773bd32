"""Ctrl-C at any instant of a start prints one line and exits with 130: no traceback, no abort, no files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trimtab.cli import interrupts

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
DEFAULT = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
"""pytest itself may run where SIGINT is ignored."""
ENTRY = "import re, sys; print('ready', flush=True); from trimtab.cli.main import entry; entry()"
"""What the installed script does."""
Interrupted = subprocess.CompletedProcess[str]


def interrupted(words: list[object], delay: float, code: str = DEFAULT + ENTRY) -> Interrupted:
    """Runs a command that receives SIGINT this long after its interpreter has started."""
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


def test_a_start_can_be_interrupted_at_any_instant(tmp_path: Path) -> None:
    """During imports of typer, pydantic, rich and numpy, and at the end of the process."""
    codes = set()
    for tick in range(24):
        done = interrupted(["runs", tmp_path], 0.01 + tick * 0.015)
        assert done.stderr in ("", "error: stopped\n"), (tick, done.stderr)
        assert done.returncode == (130 if done.stderr else 0), (tick, done)
        codes.add(done.returncode)
    assert 130 in codes


# The handler runs inside the import of a module that swallows KeyboardInterrupt, as numpy and torch sometimes do.
SWALLOWING = """
import os, signal, time
try:
    {press}
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        time.sleep(0.01)
except BaseException as error:
    print("raised inside", type(error).__name__, flush=True)
complete = True
"""
WITHIN = """
import sys
sys.path.insert(0, sys.argv.pop())
from trimtab.cli import commands, interrupts
from trimtab.cli.main import entry

def main(arguments):
    {begin}
    try:
        import swallowing
        for _ in range(200):
            __import__("time").sleep(0.01)
        print("continued")
        return 0
    except KeyboardInterrupt as error:
        print("complete", swallowing.complete)
        return commands._fail("stopped", 130)
    finally:
        print("cleaned up")

commands.main = main
entry()
"""
PRESS = "os.kill(os.getpid(), signal.SIGINT)"


@pytest.fixture
def within(tmp_path: Path) -> Callable[..., Interrupted]:
    """Runs a verb that imports a module during which Ctrl-C is pressed."""

    def call(begin: str, press: str = PRESS) -> Interrupted:
        (tmp_path / "swallowing.py").write_text(SWALLOWING.format(press=press))
        code = DEFAULT + WITHIN.format(begin=begin)
        return subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60
        )

    return call


def test_ctrl_c_in_an_import_before_work_begins_exits_immediately(within: Callable[..., Interrupted]) -> None:
    done = within("pass")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: stopped\n")


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_after_work_begins_waits_for_an_import(within: Callable[..., Interrupted], times: int) -> None:
    """The signal arrives twice: timeout(1) sends it to the process and to its group."""
    done = within("interrupts.begin_work()", "; ".join([PRESS] * times))
    assert done.returncode == 130, done
    assert done.stdout == "complete True\ncleaned up\n"
    assert done.stderr == "error: stopped\n"


def test_a_second_ctrl_c_does_not_wait_for_an_import(within: Callable[..., Interrupted]) -> None:
    done = within(
        "interrupts.FORCE_EXIT_SECONDS = 0.1; interrupts.begin_work()", f"{PRESS}; time.sleep(0.2); {PRESS}"
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: stopped\n")


def test_an_ignored_sigint_remains_ignored(tmp_path: Path) -> None:
    """With nohup, or started by a script with `&`."""
    ignoring = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {ENTRY}"
    done = interrupted(["runs", tmp_path], 0.1, ignoring)
    assert (done.returncode, done.stderr) == (0, ""), done


def test_few_modules_are_imported_before_sigint_is_handled() -> None:
    code = (
        "import sys; before = set(sys.modules); import trimtab.cli.main; print(*(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"typing", "typer", "rich", "pydantic", "numpy", "pathlib"} & set(done.stdout.split())


def test_a_program_that_calls_the_command_line_keeps_its_handler() -> None:
    before = signal.getsignal(signal.SIGINT)
    interrupts.begin_work()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_start_of_training_can_be_interrupted(world: object, tmp_path: Path) -> None:
    """While torch is imported, and while the run is prepared: the folder is removed, or the run is saved."""
    for delay in (0.3, 0.8, 1.3, 1.8, 2.3):
        run = tmp_path / f"run-{delay}"
        done = interrupted(["train", world.recipe, f"output_dir={run}"], delay)  # type: ignore[attr-defined]
        assert done.returncode == 130, done
        assert "Traceback" not in done.stderr, done.stderr
        assert not run.exists() or "everything is saved" in done.stdout, done
