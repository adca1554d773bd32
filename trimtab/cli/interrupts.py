"""Ctrl-C (SIGINT) of the command line, which must not raise inside an import.

Python's own handler raises KeyboardInterrupt wherever the program is. Inside an import this leaves half-imported
modules behind, which later code meets as an AttributeError or an endless recursion (numpy); packages swallow it and the
program continues; in the middle of torch's C++ code it aborts the process. So Ctrl-C during an import ends the process
at once as long as nothing was written or started, and waits for the import to end from then on (`work_begins`).

This module is loaded before anything else, so it imports little.
"""

from __future__ import annotations

import _thread
import atexit
import os
import signal
import time

TYPE_CHECKING = False  # without the import of typing
if TYPE_CHECKING:
    from types import FrameType

EXIT_CODE = 128 + signal.SIGINT
RETRY_SECONDS = 0.02
"""How long to wait before looking again whether an import has ended."""
IMPATIENT_SECONDS = 1.0
"""A second Ctrl-C this long after the first does not wait for an import any more."""
SAME_SECONDS = 0.1
"""Signals so close to each other are one: timeout(1) sends its signal to the process and to its group."""


class Interrupts:
    """Handles SIGINT as Python does, but raises no KeyboardInterrupt inside an import.

    Example:
        >>> Interrupts().install()  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self.is_work_begun = False
        self._waiting_since: float | None = None
        """When an import was interrupted that is still under way."""
        self._retrying = False
        self._raised_at = float("-inf")

    def install(self) -> None:
        """Replaces Python's own handler; a SIGINT that the caller ignores (nohup, `&`) stays ignored."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self.handle)
            # Registered first, called last. Python gives the signal back to the system when it tears itself down.
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raises, exits or waits."""
        now, retried = time.monotonic(), self._retrying
        self._retrying = False
        if is_importing(frame):
            if not self.is_work_begun:
                exit_now()
            elif self._waiting_since is None or retried:
                self._waiting_since = self._waiting_since or now
                _thread.start_new_thread(self._retry, ())  # threading has locks that this frame may hold
            elif now - self._waiting_since > IMPATIENT_SECONDS:
                exit_now()
            return
        self._waiting_since = None
        if now - self._raised_at > SAME_SECONDS:
            self._raised_at = now
            raise KeyboardInterrupt

    def _retry(self) -> None:
        time.sleep(RETRY_SECONDS)
        if self._waiting_since is not None:
            self._retrying = True
            _thread.interrupt_main(signal.SIGINT)


def is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported in a frame or in one that called it."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def exit_now() -> None:
    """Ends the process without cleaning up, with the line that every interrupted command prints."""
    try:
        os.write(2, b"error: stopped\n")
    finally:
        os._exit(EXIT_CODE)


def work_begins() -> None:
    """A verb is about to write files or start processes: from now on an interrupted import is finished first.

    Only in a process whose SIGINT `Interrupts` handles; a program that calls the command line as a function keeps its
    own handler.
    """
    owner = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    if isinstance(owner, Interrupts):
        owner.is_work_begun = True


def outcome_decided(code: int) -> None:
    """The command is done and answered: Ctrl-C may now shorten the end of the process, not change its exit code."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(code))
