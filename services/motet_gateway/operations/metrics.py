"""Count requests and replies: once per request, never per token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from motet_gateway.tenancy.counters import TenantCounters
from motet_gateway.tenancy.usage import ReplyMeter
from motet_pipelines.chat.chat import Outcome
from motet_shared.errors import BadRequest, DeadlineExceeded, MotetError
from motet_shared.messages import Usage
from motet_shared.process.telemetry import Metrics, Stopwatch, request_id

from .recent_replies import Recent, Reply
from .speech_metrics import SpeechMetrics


class Track:
    """Measure one reply: a context manager around it, and `got` for each batch that arrives."""

    __slots__ = ("_meter", "_metrics", "_model", "_outcome", "items", "stopwatch")

    def __init__(self, metrics: GatewayMetrics, model: str, outcome: Outcome, meter: ReplyMeter):
        self._metrics, self._model = metrics, model
        self._outcome, self._meter = outcome, meter
        self.items = 0
        self.stopwatch = Stopwatch("gateway")

    def got(self, batch: Sequence[Any]) -> None:
        if not self.items:
            self.stopwatch.add("first", self.stopwatch.total)
        self.items += len(batch)
        self._meter.got(batch)

    def __enter__(self) -> Track:
        self._meter.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        outcome = self._outcome
        usage = outcome.end.usage if outcome.end is not None else None
        if outcome.end is not None:
            self.stopwatch.merge(outcome.end.timing)
        # A prompt that was encoded only to be refused has cost as much as one that was answered.
        failed = isinstance(error, MotetError) and not isinstance(
            error, (BadRequest, DeadlineExceeded)
        )
        self._meter.done(usage, free=failed and not self.items)
        self._metrics.observe(
            self._model, self.stopwatch, usage.completion_tokens if usage else self.items, outcome
        )
        # What a batch waits for would be taken for the latency that clients notice.
        if not self._meter.is_background:
            self._metrics.recent.note(
                self._reply(usage, "failed" if isinstance(error, MotetError) else "left")
            )

    def _reply(self, usage: Usage | None, cut_off: str) -> Reply:
        """Return the record of this reply. `cut_off`: its status if it has no end."""
        timing, end = self.stopwatch.as_dict(), self._outcome.end
        return Reply(
            ended=self._metrics.recent.clock(),
            request=request_id.get() or "",
            model=self._model,
            status=end.status if end is not None else cut_off,
            prompt_tokens=usage.prompt_tokens if usage else 0,
            cached_tokens=usage.cached_tokens if usage else 0,
            tokens=usage.completion_tokens if usage else self.items,
            first=timing.get("gateway.first"),
            total=timing["gateway.total"],
            moves=self._outcome.moves,
            timing=timing,
        )


class GatewayMetrics:
    """Hold the gateway's Prometheus metrics."""

    def __init__(self, metrics: Metrics):
        self.registry = metrics
        self._requests = metrics.counter(
            "http", "requests", "HTTP requests by path and status", ("path", "status")
        )
        self._tokens = metrics.counter("completion", "tokens", "tokens sent to clients", ("model",))
        self._replies = metrics.counter(
            "finished", "replies", "replies by how they ended", ("model", "status")
        )
        self._moves = metrics.counter(
            "reply", "failovers", "replies that went on at another tokenizer"
        )
        self._stages = metrics.histogram(
            "stage", "seconds", "time of a reply by <role>.<stage>", ("stage",)
        )
        self.tenants = TenantCounters(metrics)
        self.speech = SpeechMetrics(metrics)
        self.recent = Recent()
        self._refusals = metrics.counter(
            "connection",
            "refusals",
            "connections refused or closed before their request, by reason",
            ("reason",),
        )
        self.connections = metrics.gauge("open", "connections", "connections of clients")
        self.streams = metrics.gauge("active", "streams", "replies being generated")
        self.sockets = metrics.gauge("active", "sockets", "open realtime sessions")

    def begin(self, model: str, outcome: Outcome, meter: ReplyMeter) -> Track:
        return Track(self, model, outcome, meter)

    def request(self, path: str, status: int) -> None:
        self._requests.labels(path, status).inc()

    def refuse_connection(self, reason: str) -> None:
        self._refusals.labels(reason).inc()

    def observe(self, model: str, stopwatch: Stopwatch, tokens: int, outcome: Outcome) -> None:
        self._tokens.labels(model).inc(tokens)
        self._replies.labels(
            model, outcome.end.status if outcome.end is not None else "broken"
        ).inc()
        self._moves.inc(outcome.moves)
        for stage, seconds in stopwatch.as_dict().items():
            self._stages.labels(stage).observe(seconds)


def server_timing(stopwatch: Stopwatch) -> bytes:
    """Return the `Server-Timing` header: milliseconds by stage, to tell transport from models."""
    return ", ".join(
        f"{stage};dur={seconds * 1000:.3f}" for stage, seconds in stopwatch.as_dict().items()
    ).encode()
