"""Batch the forward passes of all loops: one pass computes many calls.

A loop runs on its own thread and waits in `denoise`. The engine's thread takes calls that fit
together (`take`), computes them, and delivers the outputs. `take` waits for loops between two
passes, as their work there is short, but not for those that encode text or decode pixels.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from .merge import merge_key, rows_of
from .model_call import ModelCall
from .request import Key

# Seconds that `take` waits for loops between two passes: several times a scheduler's step.
_BETWEEN_PASSES = 0.05


class LoopCancelled(BaseException):
    """Signal to a loop that its picture was cancelled.

    Not an Exception, so that no pipeline handles it as an error.
    """


@dataclass(eq=False, slots=True)
class PendingCall:
    """Hold a forward pass that a loop waits for."""

    key: Key
    call: ModelCall
    kind: Hashable
    rows: int
    output: Any = None
    error: BaseException | None = None
    ready: threading.Event = field(default_factory=threading.Event)


class StepBatcher:
    """Exchange calls and answers between loops and the engine.

    All methods may be called on any thread, except `take`, which is the engine thread's.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pending: list[PendingCall] = []  # in order of arrival
        self._between_passes: set[Key] = set()  # loops with an output that have not called again
        self._cancelled: set[Key] = set()
        self._woken = False

    def __len__(self) -> int:
        return len(self._pending)

    # ------------------------------------------------------------------------------ called by loops
    def denoise(self, key: Key, call: ModelCall) -> Any:
        """Return the output of the call's model.

        Raises what the model raised, and LoopCancelled after `cancel`.
        """
        kind = (call.target, merge_key(call.call))
        pending = PendingCall(key, call, kind, rows_of(call.call))
        with self._changed:
            if key in self._cancelled:
                raise LoopCancelled
            self._between_passes.discard(key)
            self._pending.append(pending)
            self._changed.notify_all()
        pending.ready.wait()
        if pending.error is not None:
            raise pending.error
        return pending.output

    def release(self, key: Key) -> None:
        """Stop waiting for this loop: it will not call again, or not soon."""
        with self._changed:
            self._between_passes.discard(key)
            self._changed.notify_all()

    def end(self, key: Key) -> None:
        """Forget a loop that has ended."""
        with self._changed:
            self._cancelled.discard(key)
        self.release(key)

    # ------------------------------------------------------------------------- called by the engine
    def cancel(self, key: Key) -> None:
        """Cancel a picture: raise LoopCancelled in its loop, at the current or the next `denoise`."""
        with self._changed:
            self._cancelled.add(key)
            cancelled = [pending for pending in self._pending if pending.key == key]
            self._pending = [pending for pending in self._pending if pending.key != key]
            self._between_passes.discard(key)
        for pending in cancelled:
            pending.error = LoopCancelled()
            pending.ready.set()

    def wake(self) -> None:
        """Interrupt a `take` that waits for loops, as the engine has other work."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def take(self, timeout: float, max_rows: int) -> list[PendingCall]:
        """Return the calls that fit the one waiting longest, at most `max_rows` rows; maybe none.

        Waits up to `timeout` seconds for a first call.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._woken or bool(self._pending), timeout)
            self._changed.wait_for(
                lambda: self._woken or not self._between_passes,
                _BETWEEN_PASSES if self._pending else 0.0,
            )
            self._woken = False
            return self._take_fitting(max_rows)

    def _take_fitting(self, max_rows: int) -> list[PendingCall]:
        batch: list[PendingCall] = []
        rest: list[PendingCall] = []
        rows = 0
        for pending in self._pending:
            fits = not batch or (pending.kind == batch[0].kind and rows + pending.rows <= max_rows)
            (batch if fits else rest).append(pending)
            rows += pending.rows if fits else 0
        self._pending = rest
        return batch

    def deliver(
        self, pending: PendingCall, output: Any = None, error: BaseException | None = None
    ) -> None:
        """Give a call its output or error, and let its loop continue."""
        pending.output, pending.error = output, error
        with self._changed:
            self._between_passes.add(pending.key)
        pending.ready.set()
