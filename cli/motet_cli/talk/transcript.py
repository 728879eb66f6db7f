"""Print a conversation: a line per turn, as far as its words are known."""

from __future__ import annotations

import sys
from typing import Literal, TextIO

Side = Literal["you", "model"]
_PROMPTS: dict[Side, str] = {"you": "you › ", "model": "    › "}


class Transcript:
    """Print words as they come; a line changes with the side that speaks."""

    def __init__(self, file: TextIO | None = None):
        self._file = file or sys.stdout
        self._side: Side | None = None  # whose line is open

    def add(self, side: Side, words: str) -> None:
        """Print words of a side, on its open line or on a new one."""
        if not words:
            return
        if self._side != side:
            self.end_line()
            self._write(_PROMPTS[side])
            words = words.lstrip()
            self._side = side
        self._write(words)

    def interrupt(self) -> None:
        """Mark that the model was interrupted."""
        if self._side == "model":
            self._write(" (interrupted)")
        self.end_line()

    def end_line(self, side: Side | None = None) -> None:
        """End the open line, or only that of one side."""
        if self._side is None or side not in (None, self._side):
            return
        self._write("\n")
        self._side = None

    def _write(self, text: str) -> None:
        self._file.write(text)
        self._file.flush()
