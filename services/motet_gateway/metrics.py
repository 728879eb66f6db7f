"""What the gateway counts: once per request, never per token."""

from __future__ import annotations

from motet_pipelines.chat import Outcome
from motet_shared.telemetry import Metrics, Stopwatch


class Track:
    """The measurements of one reply. `got` for each batch that arrives, `done` in any case at its end."""

    __slots__ = ("_metrics", "_model", "items", "stopwatch")

    def __init__(self, metrics: GatewayMetrics, model: str):
        self._metrics = metrics
        self._model = model
        self.items = 0
        self.stopwatch = Stopwatch("gateway")

    def got(self, items: int) -> None:
        if not self.items:
            self.stopwatch.add("first", self.stopwatch.total)
        self.items += items

    def done(self, outcome: Outcome) -> None:
        usage = outcome.end.usage if outcome.end is not None else None
        if outcome.end is not None:
            self.stopwatch.merge(outcome.end.timing)
        self._metrics.observe(self._model, self.stopwatch, usage.completion_tokens if usage else self.items, outcome)


class GatewayMetrics:
    """The gateway's Prometheus metrics."""

    def __init__(self, metrics: Metrics):
        self.registry = metrics
        self._requests = metrics.counter("http", "requests", "HTTP requests by path and status", ("path", "status"))
        self._tokens = metrics.counter("completion", "tokens", "tokens sent to clients", ("model",))
        self._replies = metrics.counter("replies", "count", "replies by how they ended", ("model", "status"))
        self._moves = metrics.counter("reply", "moves", "replies that went on at another tokenizer")
        self._stages = metrics.histogram("stage", "seconds", "time of a reply by <role>.<stage>", ("stage",))
        self.streams = metrics.gauge("active", "streams", "replies being generated")
        self.sockets = metrics.gauge("active", "sockets", "open realtime sessions")

    def begin(self, model: str) -> Track:
        return Track(self, model)

    def request(self, path: str, status: int) -> None:
        self._requests.labels(path, status).inc()

    def observe(self, model: str, stopwatch: Stopwatch, tokens: int, outcome: Outcome) -> None:
        self._tokens.labels(model).inc(tokens)
        self._replies.labels(model, outcome.end.status if outcome.end is not None else "broken").inc()
        self._moves.inc(outcome.moves)
        for stage, seconds in stopwatch.as_dict().items():
            self._stages.labels(stage).observe(seconds)


def server_timing(stopwatch: Stopwatch) -> bytes:
    """The `Server-Timing` header: milliseconds by stage, so that plumbing and model time can be told apart."""
    return ", ".join(f"{stage};dur={seconds * 1000:.3f}" for stage, seconds in stopwatch.as_dict().items()).encode()
