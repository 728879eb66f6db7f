"""What is kept of replies, and what is told of them."""

from __future__ import annotations

from typing import Any

import pytest

from motet_gateway.operations.recent_replies import KEPT, Recent, Reply, percentiles
from motet_gateway.operations.spans import Span, spans
from motet_gateway.operations.stack import work
from motet_shared.messages import PROTOCOL, Heartbeat


def reply(**differing: Any) -> Reply:
    fields: dict[str, Any] = {
        "ended": 100.0,
        "request": "r1",
        "model": "m",
        "status": "stop",
        "prompt_tokens": 7,
        "cached_tokens": 3,
        "tokens": 5,
        "first": 0.2,
        "total": 0.6,
        "moves": 0,
        "timing": {},
    }
    return Reply(**fields | differing)


def test_the_time_between_tokens_is_that_after_the_first() -> None:
    assert reply().between == pytest.approx(0.1)
    assert reply(tokens=1).between is None
    assert reply(first=None).between is None


@pytest.mark.parametrize(
    ("differing", "good"),
    [
        ({}, True),
        ({"first": 0.31}, False),
        ({"total": 1.0}, False),
        ({"status": "failed"}, False),
        ({"status": "left"}, False),
        ({"first": None}, False),
        ({"tokens": 1, "total": 9.0}, True),
    ],
)
def test_a_good_reply_begins_and_goes_on_in_time(differing: dict[str, Any], good: bool) -> None:
    assert reply(**differing).is_good(0.3, 0.15) is good


def test_percentiles_are_values_that_were_seen() -> None:
    assert percentiles(float(n) for n in range(1, 101)) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert percentiles([None, 2.0]) == {"p50": 2.0, "p95": 2.0, "p99": 2.0}
    assert percentiles([None]) is None


def test_a_summary_is_of_the_window_and_judges_what_somebody_waited_for() -> None:
    recent = Recent(clock=lambda: 110.0)
    recent.note(reply(ended=50.0))
    recent.note(reply(first=0.3, total=0.7))
    recent.note(reply(first=9.0, total=9.4))
    recent.note(reply(status="failed", tokens=0, first=None))
    recent.note(reply(status="left", first=99.0))
    told = recent.summary(20.0, 1.0, 0.2)
    assert (told["replies"], told["failed"]) == (4, 1)
    assert told["tokens_per_second"] == 15 / 20
    assert told["good"] == pytest.approx(1 / 3)
    assert told["first_token_seconds"] == {"p50": 0.3, "p95": 9.0, "p99": 9.0}
    assert Recent().summary(20.0, 1.0, 0.2)["good"] is None


def test_the_last_ones_are_found_by_request_and_the_oldest_are_forgotten() -> None:
    recent = Recent()
    for number in range(KEPT + 2):
        recent.note(reply(request=f"r{number}"))
    assert [one.request for one in recent.last(2)] == [f"r{KEPT + 1}", f"r{KEPT}"]
    assert recent.last(5, "r1") == []
    assert [one.request for one in recent.last(5, "r2")] == ["r2"]


def test_stages_follow_one_another_inside_their_service() -> None:
    timing = {
        "gateway.first": 0.3,
        "gateway.total": 1.0,
        "tokenizer.total": 0.9,
        "tokenizer.encode": 0.125,
        "decode.queue": 0.025,
        "decode.prefill": 0.125,
        "decode.decode": 0.5,
        "decode.model": 0.5,
    }
    laid = [
        Span("gateway", 0.0, 1.0),
        Span("tokenizer", 0.0, 0.9),
        Span("tokenizer.encode", 0.0, 0.125),
        Span("decode.queue", 0.125, 0.025),
        Span("decode.prefill", 0.15, 0.125),
        Span("decode.decode", 0.275, 0.5),
    ]
    assert spans(timing) == laid
    assert reply(timing=timing).document()["spans"][-1] == {
        "name": "decode.decode",
        "start": 0.275,
        "seconds": 0.5,
    }


def beat(role: str, load: dict[str, float]) -> Heartbeat:
    return Heartbeat(
        v=PROTOCOL, role=role, instance=f"{role}-1", state="ready", seq=0, models=[], load=load
    )


def test_work_is_counted_in_what_a_service_makes() -> None:
    assert work(beat("decode", {"tokens": 7.0, "seconds": 3.0})) == {
        "done": 7.0,
        "unit": "tokens/s",
    }
    assert work(beat("tts", {"tokens": 7.0, "seconds": 3.0})) == {
        "done": 3.0,
        "unit": "× real time",
    }
    assert work(beat("decode", {})) is None
    assert work(beat("gateway", {"tokens": 7.0})) is None
