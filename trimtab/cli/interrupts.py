"""Handles Ctrl-C (SIGINT) of the command line without raising inside an import.

Python's default handler raises KeyboardInterrupt anywhere. Inside an import this leaves partially imported modules,
which later cause an AttributeError or an endless recursion (numpy); some packages swallow it and the program continues;
inside torch's C++ code it aborts the process. Therefore Ctrl-C during an import exits immediately while nothing has
been written or started, and waits for the end of the import afterwards (`begin_work`).

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
"""Interval between checks whether an import has ended."""
FORCE_EXIT_SECONDS = 1.0
"""A second Ctrl-C at least this long after the first exits without waiting for an import."""
SAME_SECONDS = 0.1
"""Signals within this time count as one: timeout(1) signals both the process and its group."""


class Interrupts:
    """Handles SIGINT like Python, but does not raise KeyboardInterrupt inside an import.

    Example:
        >>> Interrupts().install()  # doctest: +SKIP
    """

    def __init__(self) -> None:
        self.is_work_begun = False
        self._waiting_since: float | None = None
        """Time of the first Ctrl-C during the current import; None outside."""
        self._retrying = False
        self._raised_at = float("-inf")

    def install(self) -> None:
        """Replaces Python's default handler; a SIGINT that the caller ignores (nohup, `&`) remains ignored."""
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self.handle)
            # Registered first, called last. Python restores the system's handler during finalization.
            atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raises KeyboardInterrupt, exits, or waits for the end of an import."""
        now, retried = time.monotonic(), self._retrying
        self._retrying = False
        if is_importing(frame):
            if not self.is_work_begun:
                exit_now()
            elif self._waiting_since is None or retried:
                self._waiting_since = self._waiting_since or now
                _thread.start_new_thread(self._retry, ())  # `threading` takes locks that this frame may own
            elif now - self._waiting_since > FORCE_EXIT_SECONDS:
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
    """Whether a frame or one of its callers is importing a module."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def exit_now() -> None:
    """Ends the process without cleanup, after the line that every interrupted command prints."""
    try:
        os.write(2, b"error: stopped\n")
    finally:
        os._exit(EXIT_CODE)


def begin_work() -> None:
    """Declares that a command is about to write files or start processes: Ctrl-C then waits for the end of an import.

    Has no effect unless `Interrupts` handles SIGINT; a program that calls the command line as a function keeps its own
    handler.
    """
    owner = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    if isinstance(owner, Interrupts):
        owner.is_work_begun = True


def exit_on_interrupt(code: int) -> None:
    """Makes Ctrl-C exit immediately with `code`, which is final: the command has finished."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(code))
