"""Provide logs, traces that cross NATS, Prometheus metrics, and time per stage of a process.

    metrics = telemetry.setup("tokenizer", instance, config)
    encoded = metrics.counter("prompt", "tokens", "prompt tokens encoded", labels=("model",))

    with telemetry.span("tokenizer.chat", parent=telemetry.extract(headers), model=name):
        timing = Stopwatch("tokenizer")
        with timing.stage("encode"):
            ...

Traces are exported if OTEL_EXPORTER_OTLP_ENDPOINT is set and the OpenTelemetry SDK is installed
(extra `telemetry`). Otherwise a span costs next to nothing, and a caller's trace id is still passed
on. The log format is in `logs`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any

import prometheus_client as prometheus
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from motet_shared.errors import ConfigError
from motet_shared.process import logs
from motet_shared.process.config import ProcessConfig
from motet_shared.process.logs import request_id

__all__ = [
    "Metrics",
    "Stopwatch",
    "extract",
    "inject",
    "request_id",
    "setup",
    "shutdown",
    "span",
    "trace_with",
]

log = logging.getLogger(__name__)


def setup(role: str, instance: str, config: ProcessConfig) -> Metrics:
    """Start logs and traces of this process; return its metrics, which are not served yet.

    Call it once, before anything else.
    """
    logs.install(role, instance, config)
    if os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        trace_with(_otlp_provider(role, instance))
    return Metrics(role, instance)


def shutdown() -> None:
    """Export all pending spans."""
    flush = getattr(_tracing.provider, "force_flush", None)
    if flush is not None:
        flush()


# ------------------------------------------------------------------------------------------- traces
class _Tracing:
    """The tracer of this process; None without an exporter.

    OpenTelemetry's global tracer is not used because it cannot be reset.
    """

    provider: trace.TracerProvider | None = None
    tracer: trace.Tracer | None = None


_tracing = _Tracing()
_propagator = TraceContextTextMapPropagator()
_NO_SPAN = nullcontext(trace.INVALID_SPAN)
_EMPTY = Context()


def trace_with(provider: trace.TracerProvider | None) -> None:
    """Send spans to `provider` from now on; None switches tracing off."""
    _tracing.provider = provider
    _tracing.tracer = provider.get_tracer("motet") if provider is not None else None


def _otlp_provider(role: str, instance: str) -> trace.TracerProvider | None:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        log.warning(
            "OTEL_EXPORTER_OTLP_ENDPOINT is set, but nothing can export traces; install `motet[telemetry]`"
        )
        return None
    provider = TracerProvider(
        resource=Resource.create({"service.name": f"motet-{role}", "service.instance.id": instance})
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def span(
    name: str, *, parent: Context | None = None, **attributes: Any
) -> AbstractContextManager[trace.Span]:
    """Return a span around a block, child of `parent` or of the current span.

    An exception marks the span as failed. Attributes that are None are left out. Enter and leave it
    in one task: not around the `yield` of a generator.
    """
    if _tracing.tracer is not None:
        known = {key: value for key, value in attributes.items() if value is not None}
        return _tracing.tracer.start_as_current_span(name, context=parent, attributes=known)
    return _NO_SPAN if not parent else _pass_through(parent)


@contextmanager
def _pass_through(parent: Context) -> Iterator[trace.Span]:
    token = otel_context.attach(parent)
    try:
        yield trace.get_current_span()
    finally:
        otel_context.detach(token)


def inject() -> dict[str, str] | None:
    """Return NATS headers that carry the current trace to the next process, None without one."""
    if not trace.get_current_span().get_span_context().is_valid:
        return None
    headers: dict[str, str] = {}
    _propagator.inject(headers)
    return headers


def extract(headers: Mapping[str, str] | None) -> Context:
    """Return the trace context of a message, for `span(parent=…)`.

    It is empty without a well-formed `traceparent`.
    """
    if not headers:
        return _EMPTY
    return _propagator.extract(
        {key.lower(): value for key, value in headers.items()}, context=Context()
    )


# ------------------------------------------------------------------------------------------ metrics
_NAME = re.compile(r"[a-z]+(_[a-z0-9]+)*")
# Histogram buckets in seconds, from one wire hop to a long reply.
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class Metrics(prometheus.CollectorRegistry):
    """Hold the metrics of one actor, named `motet_<noun>_<unit>`, with role and instance labels.

    The two labels are added on collection, so that counting costs no more than without them.
    """

    def __init__(self, role: str, instance: str):
        super().__init__()
        self._owner = {"role": role, "instance": instance}
        self._servers: list[Any] = []
        for collector in (
            prometheus.ProcessCollector,
            prometheus.PlatformCollector,
            prometheus.GCCollector,
        ):
            collector(registry=self)

    def counter(
        self, noun: str, unit: str, help: str, labels: Sequence[str] = ()
    ) -> prometheus.Counter:
        """Create a counter; its sample is named `motet_<noun>_<unit>_total`."""
        return prometheus.Counter(_name(noun, unit), help, labels, registry=self)

    def gauge(
        self, noun: str, unit: str, help: str, labels: Sequence[str] = ()
    ) -> prometheus.Gauge:
        """Create a gauge."""
        return prometheus.Gauge(_name(noun, unit), help, labels, registry=self)

    def histogram(
        self,
        noun: str,
        unit: str,
        help: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = SECONDS,
    ) -> prometheus.Histogram:
        """Create a histogram; `buckets` are upper bounds."""
        return prometheus.Histogram(_name(noun, unit), help, labels, registry=self, buckets=buckets)

    def watch(self, read: Callable[[], Mapping[str, Any]]) -> None:
        """Expose the numbers of `read` as gauges `motet_<key>`, read on each collection.

        A mapping among them becomes one gauge with a label `kind`. Texts are left out.
        """
        self.register(_Stats(read))

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with the role and instance labels."""
        for metric in super().collect():
            owned = Metric(metric.name, metric.documentation, metric.type, metric.unit)
            owned.samples = [
                sample._replace(labels={**self._owner, **sample.labels})
                for sample in metric.samples
            ]
            yield owned

    def render(self) -> bytes:
        """Return the Prometheus text format, for processes with their own HTTP server."""
        return prometheus.generate_latest(self)

    def serve(self, port: int = 0, host: str = "127.0.0.1") -> int:
        """Serve `/metrics` on a thread and return the port.

        `port` 0 takes any free port; -1 serves nothing and returns -1. Raises ConfigError if it
        cannot listen.
        """
        if port < 0:
            return -1
        try:
            server, _ = prometheus.start_http_server(port, host, registry=self)
        except OSError as error:
            message = f"metrics_port: cannot listen on {host}:{port}: {error.strerror}"
            message += "; choose another, 0 for any free one"
            raise ConfigError(message, param="metrics_port") from None
        self._servers.append(server)
        return int(server.server_port)

    def close(self) -> None:
        """Stop serving."""
        while self._servers:
            server = self._servers.pop()
            server.shutdown()
            server.server_close()


class _Stats(Collector):
    """Collect an actor's `stats()` as gauges."""

    def __init__(self, read: Callable[[], Mapping[str, Any]]):
        self._read = read

    def collect(self) -> Iterator[Metric]:
        for key, value in self._read().items():
            if isinstance(value, Mapping):
                gauge = GaugeMetricFamily(
                    f"motet_{key}", f"{key.replace('_', ' ')} by kind", labels=["kind"]
                )
                for kind, number in value.items():
                    gauge.add_metric([str(kind)], float(number))
                yield gauge
            elif isinstance(value, (int, float)):
                yield GaugeMetricFamily(f"motet_{key}", key.replace("_", " "), value=float(value))

    def describe(self) -> list[Metric]:
        """Return nothing: metrics are unknown before a read, and registering would trigger one."""
        return []


def _name(noun: str, unit: str) -> str:
    """Return the metric's full name; raise ValueError if a part is malformed."""
    name = f"motet_{noun}_{unit}"
    if not _NAME.fullmatch(noun) or not _NAME.fullmatch(unit):
        raise ValueError(
            f"metric {name!r}: noun and unit are lower-case words joined by underscores"
        )
    return name


# ------------------------------------------------------------------------------------------- timing
class _Stage:
    """Add the time between enter and leave to one stage.

    A hand-written class, since `contextmanager` is 3 times slower.
    """

    __slots__ = ("_began", "_key", "_seconds")

    def __init__(self, seconds: dict[str, float], key: str):
        self._seconds, self._key = seconds, key

    def __enter__(self) -> None:
        self._began = perf_counter()

    def __exit__(self, *_: object) -> None:
        spent = perf_counter() - self._began
        self._seconds[self._key] = self._seconds.get(self._key, 0.0) + spent


class Stopwatch:
    """Measure the seconds that one request spends at one hop, by `<role>.<stage>`, in one task.

    A hop adds up its stages and merges the report of the hop behind it. Each hop's `<role>.total`
    is wall time since the creation of its stopwatch, so the totals of two neighbouring hops differ
    by the cost of the outer hop and the wire.
    """

    __slots__ = ("_began", "_prefix", "_seconds")

    def __init__(self, role: str):
        self._prefix = role + "."
        self._seconds: dict[str, float] = {}
        self._began = perf_counter()

    def stage(self, name: str) -> _Stage:
        """Return a context manager that adds its block's wall time to `<role>.<name>`."""
        return _Stage(self._seconds, self._prefix + name)

    def add(self, name: str, seconds: float) -> None:
        """Add time that was measured elsewhere, for example on an engine's thread."""
        key = self._prefix + name
        self._seconds[key] = self._seconds.get(key, 0.0) + seconds

    def merge(self, child: Stopwatch | Mapping[str, float]) -> None:
        """Add the stages of another hop; times of equal stages (after a failover) add up."""
        for key, seconds in (child.as_dict() if isinstance(child, Stopwatch) else child).items():
            self._seconds[key] = self._seconds.get(key, 0.0) + seconds

    @property
    def total(self) -> float:
        """Return the seconds since the creation of this stopwatch."""
        return perf_counter() - self._began

    def as_dict(self) -> dict[str, float]:
        """Return all stages including merged ones, and `<role>.total`; as `messages.End.timing`."""
        return {**self._seconds, self._prefix + "total": self.total}
