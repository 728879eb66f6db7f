"""Turns from probabilities: the parameters of `server_vad`, one by one and all together."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_shared.errors import BadRequest
from motet_shared.messages import Detect, SpeechEdge
from motet_vad.edges import Edges
from support.running.refusals import refuses

MS = 32


def edges_of(probabilities: list[float], **fields: Any) -> list[SpeechEdge]:
    edges = Edges(Detect(**fields))
    found = [
        edges.frame(p, MS * number, MS * (number + 1)) for number, p in enumerate(probabilities)
    ]
    return [edge for edge in [*found, edges.finish(MS * len(probabilities))] if edge is not None]


def test_a_turn_has_its_padding_before_and_its_silence_after() -> None:
    audio = [0.0] * 20 + [0.9] * 10 + [0.0] * 20
    assert edges_of(audio, prefix_padding_ms=300, silence_duration_ms=200) == [
        SpeechEdge("start", 640 - 300, 640, 672),
        SpeechEdge("stop", 960 + 200, 960, 960 + 7 * MS),
    ]


def test_padding_reaches_neither_before_the_audio_nor_into_the_turn_before() -> None:
    audio = [0.9] * 4 + [0.0] * 8 + [0.9] * 4
    told = [
        (e.kind, e.ms) for e in edges_of(audio, prefix_padding_ms=1000, silence_duration_ms=200)
    ]
    assert told == [("start", 0), ("stop", 128 + 200), ("start", 128 + 200), ("stop", 512)]


def test_a_pause_shorter_than_the_silence_is_part_of_the_turn() -> None:
    pause = [0.0] * 6
    audio = [0.9] * 5 + pause + [0.9] * 5 + [0.0] * 20
    assert [e.kind for e in edges_of(audio, silence_duration_ms=200)] == ["start", "stop"]
    assert [e.kind for e in edges_of(audio, silence_duration_ms=150)] == ["start", "stop"] * 2


def test_the_threshold_is_where_speech_starts_and_a_margin_lower_where_silence_does() -> None:
    assert edges_of([0.69] * 30, threshold=0.7) == []
    assert [e.speech_ms for e in edges_of([0.0, 0.7, 0.0], threshold=0.7)] == [MS, 2 * MS]
    wavering = [0.8] + [0.6] * 50  # neither speech nor silence: the turn goes on
    assert [e.kind for e in edges_of(wavering, threshold=0.7, silence_duration_ms=100)] == [
        "start",
        "stop",
    ]
    assert edges_of(wavering, threshold=0.7, silence_duration_ms=100)[1].ms == 51 * MS
    assert edges_of([0.8] + [0.5] * 50, threshold=0.7, silence_duration_ms=100)[1].ms == MS + 100
    assert [e.kind for e in edges_of([0.1] + [0.0] * 9, threshold=0.1, silence_duration_ms=0)] == [
        "start",
        "stop",
    ]


def test_a_turn_may_pause_and_is_told_how_far_it_was_heard() -> None:
    audio = [0.9] * 5 + [0.0] * 6 + [0.9] * 5 + [0.0] * 9
    told = [
        (e.kind, e.ms, e.speech_ms, e.heard_ms)
        for e in edges_of(audio, silence_duration_ms=256, pause_ms=96)
    ]
    assert told == [
        ("start", 0, 0, 32),
        *[("heard", ms, min(ms, 160), ms) for ms in (128, 224)],
        ("pause", 160 + 96, 160, 256),
        *[("heard", ms, 160, ms) for ms in (288, 320, 352)],
        ("resume", 352, 352, 384),
        *[("heard", ms, min(ms, 512), ms) for ms in (480, 576)],
        ("pause", 512 + 96, 512, 608),
        *[("heard", ms, 512, ms) for ms in (640, 672, 704, 736)],
        ("stop", 512 + 256, 512, 768),
    ]
    assert [e.kind for e in edges_of(audio, silence_duration_ms=64, pause_ms=96)] == [
        *["start", "heard", "stop"],
        *["start", "heard", "stop"],
    ]


def test_speech_at_the_end_of_the_audio_stops_there() -> None:
    (_, stop) = edges_of([0.9] * 10)
    assert stop == SpeechEdge("stop", 320, 320, 320)
    (_, stop) = edges_of([0.9] * 5 + [0.0] * 5)
    assert stop == SpeechEdge("stop", 320, 160, 320)


def test_idle_time_is_told_again_and_again_and_speech_starts_it_anew() -> None:
    audio = [0.0] * 40 + [0.9] * 2 + [0.0] * 45
    assert edges_of(audio, idle_timeout_ms=500, silence_duration_ms=64, prefix_padding_ms=0) == [
        SpeechEdge("idle", 500, 0, 512),
        SpeechEdge("idle", 1000, 500, 1024),
        SpeechEdge("start", 1280, 1280, 1312),
        SpeechEdge("stop", 1408, 1344, 1408),
        SpeechEdge("idle", 1908, 1408, 1920),
        SpeechEdge("idle", 2408, 1908, 2432),
    ]


@given(
    st.lists(st.sampled_from([0.0, 0.2, 0.45, 0.55, 0.9]), max_size=80),
    st.integers(0, 600),
    st.integers(0, 600),
    st.none() | st.integers(1, 700),
)
def test_edges_alternate_in_order_and_are_where_the_parameters_say(
    audio: list[float], padding: int, quiet: int, idle: int | None
) -> None:
    found = edges_of(
        audio, prefix_padding_ms=padding, silence_duration_ms=quiet, idle_timeout_ms=idle
    )
    turns = [e for e in found if e.kind != "idle"]
    assert [e.kind for e in turns] == [
        ("start", "stop")[number % 2] for number in range(len(turns))
    ]
    assert len(turns) % 2 == 0
    told = [e.ms for e in turns]
    assert told == sorted(told)
    floor = 0
    for edge in turns:
        if edge.kind == "start":
            assert audio[edge.speech_ms // MS] >= 0.5
            assert edge.ms == max(floor, edge.speech_ms - padding)
        else:
            assert edge.ms == edge.speech_ms + quiet or edge.heard_ms == edge.ms == MS * len(audio)
            floor = edge.ms
            inner = audio[edge.speech_ms // MS : edge.heard_ms // MS]
            assert all(p < 0.5 for p in inner), (
                "no speech between the end that is told and its being noticed"
            )
    spoken = {number for number, p in enumerate(audio) if p >= 0.5}
    covered = set()
    for start, stop in zip(turns[::2], turns[1::2], strict=True):
        covered |= set(range(start.speech_ms // MS, -(-stop.speech_ms // MS)))
    assert spoken <= covered, "no speech is left out"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("threshold", -0.1),
        ("threshold", 1.5),
        ("threshold", float("nan")),
        ("prefix_padding_ms", -1),
        ("silence_duration_ms", -1),
        ("silence_duration_ms", 1_000_000),
        ("idle_timeout_ms", 0),
    ],
)
def test_parameters_out_of_bounds_are_refused_by_name(field: str, value: float) -> None:
    with refuses(BadRequest, field):
        Edges(Detect(**{field: value}))  # type: ignore[arg-type]
