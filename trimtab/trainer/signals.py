"""SIGINT, SIGTERM and SIGHUP ask the loop to save and stop after the current step; a second one stops at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

# A closed terminal (SIGHUP, where there is one) is no reason to lose a day's work either.
STOPPING = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class StopSignals:
    """Within `with`, the first signal is only noted; outside the main thread nothing is changed."""

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
