"""Where the loops of all pictures meet: each asks for its next forward pass, and one pass answers many.

A loop runs on its own thread and waits in `ask`. The engine's thread takes those whose calls fit together (`gather`),
computes, and answers. Loops that are between two passes are waited for, since what they do there is short; those that
read text or decode are not.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from .drawing import Key, Lora
from .merge import Call, fits, rows_of

_BETWEEN = 0.05  # seconds that a loop between two passes is waited for: several times what a scheduler's step takes


class Left(BaseException):
    """Raised in a loop whose picture nobody wants any more. No Exception: no pipeline may take it for an error."""


@dataclass(eq=False, slots=True)
class Asked:
    """One call that waits for its answer."""

    key: Key
    call: Call
    kind: Hashable
    rows: int
    loras: tuple[Lora, ...] = ()
    answer: Any = None
    error: BaseException | None = None
    ready: threading.Event = field(default_factory=threading.Event)


class Meeting:
    """All methods may be called on any thread; `gather` on the engine's alone."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._asked: list[Asked] = []  # in the order in which they came
        self._between: set[Key] = set()  # had an answer, and have not asked again
        self._dismissed: set[Key] = set()
        self._woken = False

    def __len__(self) -> int:
        return len(self._asked)

    # ------------------------------------------------------------------------------------------------------- the loops
    def ask(self, key: Key, call: Call, loras: tuple[Lora, ...] = ()) -> Any:
        """The denoiser's answer, with these adapters. Raises what it raised, and Left after `dismiss`."""
        asked = Asked(key, call, fits(call), rows_of(call), loras)
        with self._change:
            if key in self._dismissed:
                raise Left
            self._between.discard(key)
            self._asked.append(asked)
            self._change.notify_all()
        asked.ready.wait()
        if asked.error is not None:
            raise asked.error
        return asked.answer

    def leave(self, key: Key) -> None:
        """This loop will not ask again, or not soon."""
        with self._change:
            self._between.discard(key)
            self._change.notify_all()

    def end(self, key: Key) -> None:
        """This loop is over."""
        with self._change:
            self._dismissed.discard(key)
        self.leave(key)

    # ------------------------------------------------------------------------------------------------------ the engine
    def dismiss(self, key: Key) -> None:
        """Nobody wants this picture: its loop gets Left where it waits, or when it asks next."""
        with self._change:
            self._dismissed.add(key)
            gone = [asked for asked in self._asked if asked.key == key]
            self._asked = [asked for asked in self._asked if asked.key != key]
            self._between.discard(key)
        for asked in gone:
            asked.error = Left()
            asked.ready.set()

    def wake(self) -> None:
        """End a `gather` that waits for loops: there is something else to do."""
        with self._change:
            self._woken = True
            self._change.notify_all()

    def gather(self, patience: float, max_rows: int) -> list[Asked]:
        """The calls that fit the one that has waited longest, at most `max_rows` rows; empty if there are none."""
        with self._change:
            self._change.wait_for(lambda: self._woken or bool(self._asked), patience)
            self._change.wait_for(lambda: self._woken or not self._between, _BETWEEN if self._asked else 0.0)
            self._woken = False
            return self._take(max_rows)

    def _take(self, max_rows: int) -> list[Asked]:
        taken: list[Asked] = []
        rest: list[Asked] = []
        rows = 0
        for asked in self._asked:
            is_one = not taken or (asked.kind == taken[0].kind and rows + asked.rows <= max_rows)
            (taken if is_one else rest).append(asked)
            rows += asked.rows if is_one else 0
        self._asked = rest
        return taken

    def answer(self, asked: Asked, answer: Any = None, error: BaseException | None = None) -> None:
        """Let a loop go on."""
        asked.answer, asked.error = answer, error
        with self._change:
            self._between.add(asked.key)
        asked.ready.set()
