"""Batch the forward passes of all loops: each loop asks for one, and one pass answers many.

A loop runs on its own thread and waits in `ask`. The engine's thread takes calls that fit together
(`gather`), computes them, and answers. `gather` waits for loops between two passes, as their work
there is short, but not for those that encode text or decode pixels.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from .merge import Call, fits, rows_of
from .request import Key, Lora

# Seconds that `gather` waits for loops between two passes: several times a scheduler's step.
_BETWEEN = 0.05


class Left(BaseException):
    """Signal to a loop that its picture was cancelled.

    Not an Exception, so that no pipeline handles it as an error.
    """


@dataclass(eq=False, slots=True)
class Asked:
    """Call that waits for its answer."""

    key: Key
    call: Call
    kind: Hashable
    rows: int
    loras: tuple[Lora, ...] = ()
    answer: Any = None
    error: BaseException | None = None
    ready: threading.Event = field(default_factory=threading.Event)


class StepBatcher:
    """Exchange calls and answers between loops and the engine.

    All methods may be called on any thread, except `gather`, which is the engine thread's.
    """

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._asked: list[Asked] = []  # in order of arrival
        self._between: set[Key] = set()  # loops with an answer that have not asked again
        self._dismissed: set[Key] = set()
        self._woken = False

    def __len__(self) -> int:
        return len(self._asked)

    # ------------------------------------------------------------------------------ called by loops
    def ask(self, key: Key, call: Call, loras: tuple[Lora, ...] = ()) -> Any:
        """Return the denoiser's answer, with these adapters.

        Raises what the denoiser raised, and Left after `dismiss`.
        """
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
        """Stop waiting for this loop: it will not ask again, or not soon."""
        with self._change:
            self._between.discard(key)
            self._change.notify_all()

    def end(self, key: Key) -> None:
        """Forget a loop that is over."""
        with self._change:
            self._dismissed.discard(key)
        self.leave(key)

    # ------------------------------------------------------------------------- called by the engine
    def dismiss(self, key: Key) -> None:
        """Cancel a picture: raise Left in its loop, at the current or the next `ask`."""
        with self._change:
            self._dismissed.add(key)
            gone = [asked for asked in self._asked if asked.key == key]
            self._asked = [asked for asked in self._asked if asked.key != key]
            self._between.discard(key)
        for asked in gone:
            asked.error = Left()
            asked.ready.set()

    def wake(self) -> None:
        """Interrupt a `gather` that waits for loops, as the engine has other work."""
        with self._change:
            self._woken = True
            self._change.notify_all()

    def gather(self, patience: float, max_rows: int) -> list[Asked]:
        """Return the calls that fit the one waiting longest, at most `max_rows` rows; maybe none.

        Waits up to `patience` seconds for a first call.
        """
        with self._change:
            self._change.wait_for(lambda: self._woken or bool(self._asked), patience)
            self._change.wait_for(
                lambda: self._woken or not self._between, _BETWEEN if self._asked else 0.0
            )
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
        """Give a call its answer or error, and let its loop continue."""
        asked.answer, asked.error = answer, error
        with self._change:
            self._between.add(asked.key)
        asked.ready.set()
