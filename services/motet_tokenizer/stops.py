"""Cut a text exactly before the first stop string, wherever token borders fall.

Text that might be the beginning of a stop string is held back until that is decided. The first stop
string is the one completed first; of two completed at the same character, the longer.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Keep the state of one request. `found` is the stop string that has ended the text, else "".

    any: there are stop strings.
    """

    __slots__ = ("_firsts", "_held", "_longest", "_stops", "any", "found")

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stop for stop in stops if stop)
        self._firsts = frozenset(stop[0] for stop in self._stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.any = bool(self._stops)
        self.found = ""

    @property
    def hit(self) -> bool:
        """Return True if a stop string has ended the text."""
        return bool(self.found)

    def feed(self, text: str) -> str:
        """Return the text fed so far that is safe to show and has not been returned yet."""
        if self.hit or not text:
            return ""
        text = self._held + text
        cut = self._first(text)
        if not self.hit:
            cut = self._safe(text)
        self._held = "" if self.hit else text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Return the text held back, at the end."""
        text, self._held = self._held, ""
        return text

    def _first(self, text: str) -> int:
        """Return the start of the stop string that is completed first; -1 if none is."""
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if not found:
            return -1
        end, start = min(found)
        self.found = text[start:end]
        return start

    def _safe(self, text: str) -> int:
        """Return how many characters cannot belong to an unfinished stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._firsts:
                tail = text[start:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return start
        return len(text)
