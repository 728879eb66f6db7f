"""Compute sequences again whose rotary frequencies have changed, from their first token."""

from __future__ import annotations

from collections.abc import Sequence

from motet_llm.engine.feature import Feature
from motet_llm.engine.request import Request, RequestOptions, Status
from motet_llm.scheduling.scheduler import Scheduler
from motet_llm.scheduling.work import Work

from .sequence_rope import RopeRule


class RopeSwitch(Feature):
    """Give each request the key of its frequencies, and restart those whose key changes.

    The prefix cache has the blocks of each key apart, so a restarted request may find some there.
    """

    def __init__(self, rule: RopeRule, scheduler: Scheduler):
        self._rule = rule
        self._scheduler = scheduler
        self._switches = 0

    def admit(self, request: Request, options: RequestOptions) -> None:
        self._set(request)

    def after_step(self, works: Sequence[Work]) -> None:
        for request in [work.request for work in works]:
            if request.status is Status.FINISHED or request.rope_key == self._key(request):
                continue
            if request.status is Status.RUNNING:
                self._scheduler.restart(request)
            self._set(request)
            self._switches += 1

    def stats(self) -> dict[str, float]:
        """Return how many requests were computed again because they outgrew their frequencies."""
        return {"rope_switches": self._switches}

    def _key(self, request: Request) -> int:
        return self._rule.key(request.num_prompt, len(request.tokens))

    def _set(self, request: Request) -> None:
        request.rope_key = self._key(request)
        request.constraints.drafts_end = self._rule.drafts_end(request)
