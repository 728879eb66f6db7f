"""Telemetry through its public face: lines on stderr, spans in a real SDK, scraped metrics, and stopwatches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from motet_shared.errors import ConfigError
from motet_shared.process import telemetry
from motet_shared.process.config import ProcessConfig, setting
from motet_shared.process.telemetry import Metrics, Stopwatch, extract, inject, request_id, span
from support.running.refusals import refuses

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@dataclass(frozen=True, kw_only=True)
class Config(ProcessConfig):
    api_key: str | None = setting("a key", default=None, secret=True)


@pytest.fixture(autouse=True)
def _restored_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    yield
    root.handlers = handlers
    root.setLevel(level)
    telemetry.trace_with(None)


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry.trace_with(provider)
    yield exporter
    telemetry.trace_with(None)


def logged(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    entry = json.loads(capsys.readouterr().err)
    assert isinstance(entry, dict)
    return entry


# -------------------------------------------------------------------------------------------------------------- logs
def test_a_json_line_holds_role_instance_request_message_and_extra_fields(
    capsys: pytest.CaptureFixture[str],
) -> None:
    telemetry.setup("decode", "decode-1", Config())
    token = request_id.set("req-7")
    logging.getLogger("motet.engine").warning(
        "out of %s", "blocks", extra={"free": 0, "path": object}
    )
    request_id.reset(token)
    entry = logged(capsys)
    assert entry["time"].endswith("Z")
    assert {
        key: entry[key]
        for key in ("level", "role", "instance", "request_id", "logger", "message", "free")
    } == {
        "level": "warning",
        "role": "decode",
        "instance": "decode-1",
        "request_id": "req-7",
        "logger": "motet.engine",
        "message": "out of blocks",
        "free": 0,
    }


def test_an_exception_is_logged_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.setup("decode", "decode-1", Config())
    try:
        raise KeyError("lost")
    except KeyError:
        logging.exception("step failed")
    entry = logged(capsys)
    assert "KeyError: 'lost'" in entry["error"]
    assert "request_id" not in entry


def test_the_level_is_honoured_and_setup_may_run_twice(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        telemetry.setup("decode", "decode-1", Config(log_level="warning"))
    logging.info("quiet")
    logging.error("loud")
    assert logged(capsys)["message"] == "loud"


@pytest.mark.parametrize(
    "extra", [{"a": {1, 2}}, {"b": "\ud800"}, {"c": {(1,): 2}}, {"d": 1 << 80}, {"time": 0}]
)
def test_no_extra_field_can_break_a_line(
    capsys: pytest.CaptureFixture[str], extra: dict[str, Any]
) -> None:
    telemetry.setup("decode", "decode-1", Config())
    logging.warning("odd", extra=extra)
    entry = logged(capsys)
    assert entry["message"].strip("'") == "odd"
    assert entry["time"] != 0


@pytest.mark.parametrize("style", ["json", "text"])
def test_secrets_never_reach_the_log(capsys: pytest.CaptureFixture[str], style: Any) -> None:
    config = Config(log_format=style, api_key='s3cr"et', nats_password="hunter2")
    telemetry.setup("gateway", "gateway-1", config)
    logging.warning('key s3cr"et, pass hunter2', extra={"api_key": "unknown1", "config": config})
    logging.warning("at nats://gateway:unknown2@host:4222 with Authorization: Bearer unknown3")
    text = capsys.readouterr().err
    for secret in ("s3cr", "hunter2", "unknown"):
        assert secret not in text
    assert "nats://gateway:***@host:4222" in text


@pytest.mark.parametrize("style", ["json", "text"])
def test_each_line_of_a_secret_is_one_and_keys_are_known_by_their_beginning(
    capsys: pytest.CaptureFixture[str], style: Any
) -> None:
    telemetry.setup(
        "gateway", "gateway-1", Config(log_format=style, api_key="first-key\n\n  second-key \n")
    )
    logging.warning(
        "first-key, second-key, protocols realtime, openai-insecure-api-key.sk-motet-Ab_9-x"
    )
    text = capsys.readouterr().err
    for secret in ("first-key", "second-key", "Ab_9"):
        assert secret not in text
    assert "protocols realtime" in text


def test_the_text_format_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    telemetry.setup("decode", "decode-1", Config(log_format="text"))
    token = request_id.set("req-7")
    logging.info("ready", extra={"blocks": 12})
    request_id.reset(token)
    assert capsys.readouterr().err.rstrip().endswith("INFO    decode-1 [req-7] ready blocks=12")


async def test_each_task_has_its_own_request_id() -> None:
    async def work(name: str) -> str:
        request_id.set(name)
        await asyncio.sleep(0)
        return request_id.get()

    assert await asyncio.gather(work("a"), work("b")) == ["a", "b"]
    assert request_id.get() == ""


# ------------------------------------------------------------------------------------------------------------ traces
def test_a_trace_crosses_processes_in_the_traceparent_header(spans: InMemorySpanExporter) -> None:
    with span("gateway.chat", model="pocket", absent=None):
        headers = inject()
    assert headers is not None
    assert set(headers) == {"traceparent"}
    with span("tokenizer.chat", parent=extract({"Traceparent": headers["traceparent"]})):
        pass
    outer, inner = spans.get_finished_spans()
    assert inner.context.trace_id == outer.context.trace_id
    assert inner.parent is not None
    assert inner.parent.span_id == outer.context.span_id
    assert dict(outer.attributes or {}) == {"model": "pocket"}


def test_a_message_without_a_trace_starts_its_own(spans: InMemorySpanExporter) -> None:
    with span("outer"), span("inner", parent=extract(None)):
        pass
    inner, outer = spans.get_finished_spans()
    assert inner.parent is None
    assert inner.context.trace_id != outer.context.trace_id


@pytest.mark.parametrize(
    "value", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", TRACEPARENT[:-4]]
)
def test_a_malformed_traceparent_is_ignored(value: str) -> None:
    with span("x", parent=extract({"traceparent": value})):
        assert inject() is None


def test_a_failed_block_marks_its_span(spans: InMemorySpanExporter) -> None:
    with pytest.raises(KeyError), span("work"):
        raise KeyError("lost")
    assert spans.get_finished_spans()[0].status.status_code is trace.StatusCode.ERROR


def test_log_lines_name_the_trace(
    spans: InMemorySpanExporter, capsys: pytest.CaptureFixture[str]
) -> None:
    telemetry.setup("decode", "decode-1", Config())
    with span("x", parent=extract({"traceparent": TRACEPARENT})):
        logging.warning("inside")
    assert logged(capsys)["trace_id"] == TRACEPARENT.split("-")[1]


def test_without_a_collector_nothing_is_recorded_but_a_trace_passes_through() -> None:
    with span("x", model="pocket") as current:
        assert not current.is_recording()
        assert inject() is None
    with span("x", parent=extract({"traceparent": TRACEPARENT})):
        assert inject() == {"traceparent": TRACEPARENT}
    assert inject() is None


def test_the_exporter_is_used_only_when_an_endpoint_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry.setup("decode", "decode-1", Config())
    with span("x") as current:
        assert not current.is_recording()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")  # nothing is sent
    telemetry.setup("decode", "decode-1", Config())
    with span("x"):
        assert inject() is not None
    telemetry.shutdown()


# ----------------------------------------------------------------------------------------------------------- metrics
def test_metrics_are_scraped_with_role_and_instance() -> None:
    metrics = Metrics("decode", "decode-1")
    metrics.counter("prompt", "tokens", "prompt tokens", labels=("model",)).labels("pocket").inc(3)
    metrics.gauge("active", "streams", "streams at work").set(2)
    metrics.histogram("step", "seconds", "one engine step").observe(0.004)
    port = metrics.serve(0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            text = answer.read().decode()
    finally:
        metrics.close()
    assert 'motet_prompt_tokens_total{instance="decode-1",model="pocket",role="decode"} 3.0' in text
    assert 'motet_active_streams{instance="decode-1",role="decode"} 2.0' in text
    assert 'motet_step_seconds_bucket{instance="decode-1",le="0.005",role="decode"} 1.0' in text
    assert 'process_resident_memory_bytes{instance="decode-1",role="decode"}' in text


def test_two_actors_of_one_process_do_not_mix() -> None:
    first, second = Metrics("decode", "decode-1"), Metrics("decode", "decode-2")
    first.gauge("active", "streams", "streams").set(1)
    second.gauge("active", "streams", "streams").set(2)
    assert b'motet_active_streams{instance="decode-2",role="decode"} 2.0' in second.render()
    assert b'instance="decode-2"' not in first.render()


def test_a_taken_port_is_a_config_error_and_minus_one_is_off() -> None:
    metrics = Metrics("decode", "decode-1")
    assert metrics.serve(-1) == -1
    port = metrics.serve(0)
    try:
        with refuses(ConfigError, "metrics_port"):
            Metrics("decode", "decode-2").serve(port)
    finally:
        metrics.close()


@pytest.mark.parametrize(
    ("noun", "unit"), [("Prompt", "tokens"), ("prompt", ""), ("a-b", "seconds"), ("_x", "s")]
)
def test_metric_names_follow_the_pattern(noun: str, unit: str) -> None:
    with pytest.raises(ValueError, match=f"motet_{noun}_{unit}"):
        Metrics("decode", "decode-1").counter(noun, unit, "help")


# ------------------------------------------------------------------------------------------------------------ timing
def test_stages_add_up_and_a_failing_block_counts() -> None:
    timing = Stopwatch("tokenizer")
    for _ in range(2):
        with timing.stage("encode"):
            time.sleep(0.002)
    with pytest.raises(KeyError), timing.stage("parse"):
        raise KeyError
    result = timing.as_dict()
    assert set(result) == {"tokenizer.encode", "tokenizer.parse", "tokenizer.total"}
    assert 0.004 <= result["tokenizer.encode"] <= result["tokenizer.total"]


def test_hops_merge_so_that_totals_differ_by_the_plumbing() -> None:
    inner = Stopwatch("decode")
    inner.add("step", 0.25)
    inner.add("step", 0.25)
    outer = Stopwatch("tokenizer")
    outer.merge(inner)
    outer.merge({"decode.step": 0.5, "encoder.encode": 1.0})
    result = outer.as_dict()
    assert result["decode.step"] == 1.0
    assert result["encoder.encode"] == 1.0
    assert result["decode.total"] > 0
    assert outer.total < 0.5


def test_a_stage_costs_less_than_two_plain_context_managers() -> None:
    timing = Stopwatch("decode")

    @contextlib.contextmanager
    def plain() -> Iterator[None]:
        yield

    assert fastest(lambda: timing.stage("step")) < 2 * fastest(plain)


def fastest(block: Callable[[], AbstractContextManager[object]]) -> float:
    """Return the seconds of an empty block: the best of many measurements, which load cannot lengthen."""
    best = math.inf
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(200):
            with block():
                pass
        best = min(best, time.perf_counter() - began)
    return best
