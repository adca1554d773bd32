"""Stop strings, matched across token boundaries and never streamed, not even in part."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Buffers text that may be the beginning of a stop string.

    Example:
        >>> stops = StopStrings(["\\n\\n"])
        >>> stops.push("4.\\n"), stops.push("\\nQuestion")
        (('4.', False), ('', True))
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string; SamplingOptions refuses it"
        self._stops = tuple(stops)
        self._buffer = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """Returns (text to stream, whether a stop string was found); text from the stop string on is dropped."""
        self._buffer += piece
        positions = [at for stop in self._stops if (at := self._buffer.find(stop)) >= 0]
        if positions:
            shown, self._buffer = self._buffer[: min(positions)], ""
            return shown, True
        num_buffered = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._buffer) - num_buffered
        shown, self._buffer = self._buffer[:cut], self._buffer[cut:]
        return shown, False

    def finish(self) -> str:
        """Returns the buffered text when no more text follows."""
        rest, self._buffer = self._buffer, ""
        return rest

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the buffer that is a beginning of the stop string."""
        for size in range(min(len(stop) - 1, len(self._buffer)), 0, -1):
            if self._buffer.endswith(stop[:size]):
                return size
        return 0
