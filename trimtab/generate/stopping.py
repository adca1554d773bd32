"""Stop strings: matched across token boundaries and never streamed, not even in part."""

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
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """(text that may be shown, whether a stop string was found). Nothing after it is ever shown."""
        self._held += piece
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def finish(self) -> str:
        """Returns the buffered text when no more text follows."""
        rest, self._held = self._held, ""
        return rest

    def _overlap(self, stop: str) -> int:
        """How many characters at the end of the buffered text begin the stop string."""
        for size in range(min(len(stop) - 1, len(self._held)), 0, -1):
            if self._held.endswith(stop[:size]):
                return size
        return 0
