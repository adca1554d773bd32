"""SIGINT, SIGTERM and SIGHUP ask the loop to save and stop after the current step; a second one stops immediately."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

# SIGHUP, which not every platform has: a closed terminal must not lose the run either.
STOPPING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class StopSignals:
    """Within `with`, the first signal is only recorded; does nothing outside the main thread."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in STOPPING:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
