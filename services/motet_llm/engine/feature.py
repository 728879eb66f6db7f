"""Define the interface between the engine and its optional features.

A feature (speculation, transfer of keys and values, prompt compression, long contexts) is built
once, by `components.build`, with everything it needs. It keeps its state itself, by request. The
engine calls each hook once per step for all requests together, never per row or token; only what
happens once in a request's life is called per request: `admit`, `forget`, and the scheduler's
`AdmissionPolicy`. What a feature wants of the scheduler it writes into `Request.constraints`.

One step is: `failed` (between steps) → schedule → forward and sample → `failed` → `after_step` →
`outputs`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from motet_llm.scheduling.work import Work
from motet_shared.errors import MotetError

from .outputs import StepOutput
from .request import Request, RequestOptions


class Feature:
    """Define an optional part of the engine; the defaults do nothing."""

    @property
    def has_news(self) -> bool:
        """Return True if `outputs` has something to report although nothing is scheduled."""
        return False

    def admit(self, request: Request, options: RequestOptions) -> None:
        """Begin to keep state for a new request, and constrain it, before it is queued."""

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request that has ended; ignore an unknown one."""

    def failed(self, requests: Iterable[Request]) -> dict[Request, MotetError]:
        """Return those of `requests` that cannot go on, and why; their tokens are discarded."""
        return {}

    def after_step(self, works: Sequence[Work]) -> None:
        """Continue after a step, whose tokens are appended and published."""

    def outputs(self) -> list[StepOutput]:
        """Return reports other than tokens; called while the model computes.

        The engine adds usage and timing to outputs with `finish`, which end their requests.
        """
        return []

    def stats(self) -> dict[str, float]:
        """Return counts since the start, and the current state."""
        return {}

    def check_integrity(self, requests: set[Request]) -> None:
        """Raise InternalError if the state is inconsistent or of requests not in `requests`."""
