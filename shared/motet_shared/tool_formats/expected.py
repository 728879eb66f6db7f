"""Match the beginning of streamed text, and tell whether more text may still complete a match."""

from __future__ import annotations

import re
from functools import cached_property

SPACE = re.compile(r"\s*")  # never last in a pattern: it would match before it is complete


class Expected:
    """Match literal texts and regular expressions one after the other at the start of a text.

    A literal is divided into characters, so that a text may end within it. An expression counts as
    one part, and may end anywhere where it matches; the last part must be one that no further
    text prolongs.
    """

    def __init__(self, *parts: str | re.Pattern[str]):
        self._steps = [
            step
            for part in parts
            for step in (map(re.escape, part) if isinstance(part, str) else [part.pattern])
        ]

    @cached_property
    def _whole(self) -> re.Pattern[str]:
        return re.compile("".join(self._steps), re.DOTALL)

    @cached_property
    def _partial(self) -> re.Pattern[str]:
        partial = ""
        for step in reversed(self._steps):
            partial = rf"{step}(?:\Z|{partial})" if partial else step
        return re.compile(partial, re.DOTALL)

    def match(self, text: str) -> re.Match[str] | None:
        """Return the match, which starts at the beginning of `text`."""
        return self._whole.match(text)

    def may_match(self, text: str) -> bool:
        """Return True if `text` matches, or if it would with more characters at its end."""
        return not text or self._partial.match(text) is not None
