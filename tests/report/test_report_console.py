"""If `| head` closes the pipe, the program continues."""

from __future__ import annotations

import subprocess
import sys

CODE = """
from trimtab.report.console import new_console
console = new_console()
for i in range(20000):
    console.print("line", i)
import sys
print("worked to the end", file=sys.stderr)
"""


def test_a_closed_pipe_does_not_end_the_program() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", CODE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "line 0\n"
    process.stdout.close()
    assert "worked to the end" in process.stderr.read()
    assert process.wait() == 0
