"""Decide which models are in memory: pure rules, without a clock and without I/O.

A model is loaded when a request waits for it. If it does not fit beside the others, the one that was
used least recently leaves: one without streams if there is any, else one takes no new requests and
leaves when its streams have ended. Requests are served in the order in which models were first
asked for, so that a large model is not overtaken forever by small ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

MIN_STAY = 1.0  # seconds that a model stays once it is ready, so that its first request arrives
RETRY_AFTER = 15.0  # seconds after which a model whose start failed is tried again

Stage = Literal["absent", "queued", "clearing", "loading", "ready", "leaving", "failed"]
Action = Literal["load", "unload"]


@dataclass(kw_only=True, eq=False)
class Model:
    """Track one model's stage and requests. Times are seconds of one clock.

    size: bytes of memory that the model may use.
    keep_alive: seconds without requests after which it is unloaded.
    asked: a client's value for `keep_alive`, until it is unloaded; None: not set.
    wanted, wanted_since: number of waiting requests, and when the first began to wait.
    active, used: number of running requests, and when a request last waited or ran.
    changed: when its stage changed. problem: why its last start failed.
    follows: its processes begin to start while those of others end, and wait for their memory.
    """

    name: str
    size: int
    keep_alive: float = math.inf
    stage: Stage = "absent"
    wanted: int = 0
    wanted_since: float = 0.0
    active: int = 0
    used: float = 0.0
    changed: float = 0.0
    problem: str = ""
    asked: float | None = None
    follows: bool = False

    @property
    def stay(self) -> float:
        """Return the seconds that it stays without requests once it is ready."""
        return max(self.keep_alive if self.asked is None else self.asked, MIN_STAY)

    def left(self, now: float) -> float:
        """Return the seconds until it is unloaded if no request comes."""
        if not self.is_idle:
            return self.stay
        return max(max(self.used, self.changed) + self.stay - now, 0.0)

    @property
    def occupies(self) -> bool:
        """Return True if the model takes memory."""
        return self.stage in ("loading", "ready", "leaving")

    @property
    def is_ending(self) -> bool:
        """Return True if its last stream has ended, and its processes end in a moment."""
        return self.stage == "leaving" and not self.active

    @property
    def is_idle(self) -> bool:
        return not self.active and not self.wanted

    def enter(self, stage: Stage, now: float) -> None:
        """Change the stage to `stage` at the time `now`, in seconds."""
        if stage != self.stage:
            self.stage, self.changed = stage, now
        if stage in ("absent", "failed"):
            self.asked = None

    def note(self, wanted: int, active: int, now: float) -> None:
        """Record how many requests wait for it and how many run."""
        if wanted and not self.wanted:
            self.wanted_since = now
        self.wanted, self.active = wanted, active
        if wanted or active:
            self.used = now


class Residency:
    """Hold the models that are loaded on demand, and the memory for them.

    memory: bytes. max_loaded: most models at a time; 0: as many as fit.
    """

    def __init__(self, models: Iterable[Model], memory: int, max_loaded: int = 0):
        self.models = {model.name: model for model in models}
        self._memory, self._max_loaded = memory, max_loaded

    def decide(self, now: float) -> list[tuple[Action, Model]]:
        """Return what to do now, and set the stages of models that wait for it."""
        return [*self._expired(now), *self._loads(now)]

    def _expired(self, now: float) -> list[tuple[Action, Model]]:
        """Unload models that were not used for their `keep_alive`."""
        found: list[tuple[Action, Model]] = []
        for model in self.models.values():
            since = max(model.used, model.changed)
            if model.stage == "ready" and model.is_idle and now - since >= model.stay:
                model.enter("leaving", now)
                found.append(("unload", model))
        return found

    def _loads(self, now: float) -> list[tuple[Action, Model]]:
        """Load models that are wanted, in order; the first that does not fit makes room."""
        found: list[tuple[Action, Model]] = []
        waiting = [model for model in self.models.values() if self._is_waiting(model, now)]
        blocked = False
        for model in sorted(waiting, key=lambda model: model.wanted_since):
            if not blocked:
                found += [("unload", victim) for victim in self._victims(model, now)]
                if self._fits(model, self._resident(beside=model)):
                    model.enter("loading", now)
                    found.append(("load", model))
                    continue
            model.enter("queued" if blocked else "clearing", now)
            blocked = True
        return found

    def _is_waiting(self, model: Model, now: float) -> bool:
        if model.stage == "failed":
            return bool(model.wanted) and now - model.changed >= RETRY_AFTER
        if model.stage in ("queued", "clearing") and not model.wanted:
            model.enter("absent", now)  # its requests have been cancelled
        return bool(model.wanted) and not model.occupies

    def _resident(self, beside: Model) -> list[Model]:
        """Return the models whose memory `beside` cannot have."""
        return [
            model
            for model in self.models.values()
            if model.occupies and not (beside.follows and model.is_ending)
        ]

    def _fits(self, model: Model, beside: list[Model]) -> bool:
        """Return True if a model fits; alone it always may try."""
        if not beside:
            return True
        count = not self._max_loaded or len(beside) < self._max_loaded
        return count and sum(other.size for other in beside) + model.size <= self._memory

    def _victims(self, model: Model, now: float) -> list[Model]:
        """Have models leave until `model` will fit; none while those that leave already suffice."""
        staying = [other for other in self.models.values() if other.stage in ("loading", "ready")]
        leaving: list[Model] = []
        order = sorted(staying, key=lambda other: (not other.is_idle, other.used, other.changed))
        for victim in order:
            if self._fits(model, staying):
                break
            if victim.stage == "ready" and now - victim.changed >= MIN_STAY:
                staying.remove(victim)
                victim.enter("leaving", now)
                leaving.append(victim)
        return leaving
