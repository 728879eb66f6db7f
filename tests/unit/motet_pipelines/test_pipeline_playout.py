"""What a listener has of speech: first audio, factor, underruns; silence of the writer is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_pipelines.voice.playout import Playout

RATE = 100  # bytes per second


def test_audio_that_comes_in_time_has_no_underrun() -> None:
    playout = Playout(RATE)
    playout.begin(10.0)
    playout.receive(100, 10.5)
    playout.resume(10.5)
    playout.receive(100, 11.4)
    playout.end(11.4)
    assert playout.first_audio == pytest.approx(0.5)
    assert (playout.seconds, playout.underruns, playout.stalled) == (2.0, 0, 0.0)
    assert playout.realtime_factor == pytest.approx(0.7)
    assert playout.continuity == 1.0


def test_late_audio_is_an_underrun_of_its_length() -> None:
    playout = Playout(RATE)
    playout.begin(0.0)
    for at in (0.5, 2.0, 3.5):  # each a second of audio
        playout.receive(100, at)
        playout.resume(at)
    assert playout.underruns == 2
    assert playout.stalled == pytest.approx(1.0)
    assert playout.continuity == pytest.approx(0.75)


def test_what_the_writer_takes_is_no_underrun() -> None:
    playout = Playout(RATE)
    for began in (0.0, 10.0):  # two sentences, the second written late
        playout.begin(began)
        playout.receive(100, began + 0.2)
        playout.end(began + 0.2)
    assert playout.underruns == 0
    assert playout.computed == pytest.approx(0.4)
    playout.begin(11.0)  # in time: the listener still plays, until 11.2
    playout.receive(100, 11.5)
    assert playout.underruns == 1
    assert playout.stalled == pytest.approx(0.3)


def test_a_client_that_does_not_read_has_no_underrun() -> None:
    playout = Playout(RATE)
    playout.begin(0.0)
    playout.receive(100, 0.1)
    playout.resume(60.0)
    playout.receive(100, 60.2)
    assert playout.underruns == 0
    assert playout.realtime_factor == pytest.approx(0.15)


def test_without_audio_there_are_no_figures() -> None:
    playout = Playout(RATE)
    playout.begin(0.0)
    playout.receive(0, 1.0)
    assert (playout.first_audio, playout.realtime_factor, playout.continuity) == (None, None, None)


@given(st.lists(st.tuples(st.floats(0.001, 3), st.integers(1, 300)), min_size=1, max_size=20))
def test_listening_lasts_as_long_as_audio_and_stalls(chunks: list[tuple[float, int]]) -> None:
    playout, now = Playout(RATE), 0.0
    playout.begin(now)
    for gap, count in chunks:
        now += gap
        playout.receive(count, now)
        playout.resume(now)
    assert playout.computed == pytest.approx(now)
    first = playout.first_audio
    assert first is not None
    ended = first + playout.stalled + playout.seconds  # when the listener has heard all
    assert ended >= now - 1e-6
    assert playout.underruns < len(chunks)
    assert (playout.stalled > 0) == (playout.underruns > 0)
