"""Follow the copy that a pipeline makes of its scheduler, for latents beside those of the frames.

LTX-2 does so for its sound: it copies the scheduler before the first step, and has the copy make
each step after the scheduler itself.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

_STEP, _COPY = "step", "__deepcopy__"


class Companion:
    """Hold the copy of one video's scheduler, and the latents after its last step.

    after: called with the latents after each step of the copy; returns those to go on with. Make it
    before the scheduler's `step` is replaced: the copy has its own.
    """

    def __init__(self, scheduler: Any, after: Callable[[Tensor], Tensor]):
        self.latents: Tensor | None = None
        self._original, self._after = scheduler, after
        self._copy: Any = None
        vars(scheduler)[_COPY] = self._copied

    def memories(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it, by name; {} before the scheduler is copied."""
        return {} if self._copy is None else {"sound": self, "sound_scheduler": self._copy}

    def _copied(self, memo: dict[int, Any]) -> Any:
        """Return a copy of the scheduler, whose steps are followed."""
        kind: Any = type(self._original)
        own = {
            name: value
            for name, value in vars(self._original).items()
            if name not in (_STEP, _COPY)
        }
        self._copy = kind.__new__(kind)
        vars(self._copy).update(copy.deepcopy(own, memo))
        step = self._copy.step

        @functools.wraps(step)
        def followed_step(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            self.latents = result[0]
            latents = self._after(result[0])
            if isinstance(result, tuple):
                return (latents, *result[1:])
            return type(result)(latents)

        self._copy.step = followed_step
        return self._copy
