"""Cutting and stitching: a long recording loses no word and says none twice; what is stable stays."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet_asr.engine.request import TimedSegment, Word
from motet_asr.service import scored
from motet_asr.transcription.live import Agreement
from motet_asr.transcription.stitch import join
from motet_asr.transcription.windows import SpeechFlags, Window, cut, mark_spans
from motet_shared.errors import BadRequest
from support.running.refusals import refuses

RATE = 16_000
CALM = settings(max_examples=60)
TEXTS = ("no", "no", "yes", "red", "circle", "a", "the", "square")


def speech(pattern: list[tuple[bool, float]], seed: int = 0, gain: float = 0.1) -> Any:
    """Noise where somebody is_speech, quiet hiss where nobody does: (is_speech, seconds) in turn."""
    generator = np.random.default_rng(seed)
    parts = [
        generator.standard_normal(round(s * RATE)) * (gain if is_speech else gain / 300)
        for is_speech, s in pattern
    ]
    return np.concatenate(parts).astype(np.float32)


# ------------------------------------------------------------------------------------------------------------ cutting
@CALM
@given(
    st.lists(st.tuples(st.booleans(), st.floats(0.05, 7)), min_size=1, max_size=14),
    st.sampled_from([2.0, 6.0, 12.0, 30.0]),
    st.sampled_from([0.002, 0.1, 3.0]),
)
def test_windows_cover_everything_and_are_never_too_long(
    pattern: list[tuple[bool, float]], longest: float, gain: float
) -> None:
    audio = speech(pattern, gain=gain)
    assert_covers(cut(audio, longest), audio, longest)


def assert_covers(windows: list[Window], audio: Any, longest: float) -> None:
    """Every sample is in some window, in order, and none that is to be heard is too long."""
    assert windows[0].start == 0
    assert windows[-1].end == len(audio) / RATE
    assert [window.index for window in windows] == list(range(len(windows)))
    for window in windows:
        assert window.seconds > 0
        assert window.silent or window.seconds <= longest + 1e-9
        assert window.silent or len(window.of(audio)) <= longest * RATE + 1
    for before, after in pairwise(windows):
        assert after.start == before.end - after.overlap
        assert after.end > before.end


@st.composite
def spans(draw: st.DrawFn) -> list[tuple[float, float]]:
    found, now = [], 0.0
    for _ in range(draw(st.integers(0, 12))):
        start = now + draw(st.sampled_from([0.1, 0.3, 0.6, 2.0, 5.0, 20.0]))
        now = start + draw(st.sampled_from([0.05, 0.5, 3.0, 8.0]))
        found.append((round(start, 3), round(now, 3)))
    return found


@CALM
@given(spans(), st.floats(0.01, 9.0), st.sampled_from([2.0, 6.0, 12.0, 30.0]))
def test_marked_speech_is_heard_and_long_silences_are_not(
    marked: list[tuple[float, float]], after: float, longest: float
) -> None:
    """Whatever the level says: all of this is noise of one loudness."""
    total = (marked[-1][1] if marked else 0.0) + after
    audio = speech([(True, total)])
    windows = cut(audio, longest, mark_spans(marked))
    assert_covers(windows, audio, longest)
    heard = [window for window in windows if not window.silent]
    for start, end in marked:
        first = min(
            (window for window in heard if window.end > start), key=lambda window: window.start
        )
        assert first.start <= start
        assert any(window.start < end <= window.end + 1e-6 for window in heard)
        for moment in np.arange(start, end, 0.1):
            assert any(window.start <= moment <= window.end for window in heard)
    for window in windows[1:]:
        if not window.overlap and not window.silent:
            assert not any(start + 0.02 < window.start < end - 0.02 for start, end in marked), (
                "no cut falls into speech"
            )
    silence = [
        b - a
        for a, b in zip(
            [0.0, *(e for _, e in marked)], [*(s for s, _ in marked), total], strict=True
        )
    ]
    unheard = sum(window.seconds for window in windows if window.silent)
    assert unheard >= sum(gap - 0.9 for gap in silence if gap > 4.0) - 1e-6


@pytest.mark.parametrize(
    "wrong", [(2.0, 1.0), (-1.0, 1.0), (float("nan"), 1.0), (0.0, float("inf"))]
)
def test_what_is_no_span_is_refused(wrong: tuple[float, float]) -> None:
    with refuses(BadRequest, "speech"):
        mark_spans([(0.0, 0.5), wrong])


@pytest.mark.parametrize("late", [2.5, 1e9, 1e308])
def test_spans_behind_the_end_are_cut_off(late: float) -> None:
    audio = speech([(True, 2.0)])
    assert cut(audio, 5.0, mark_spans([(1.0, late)])) == cut(audio, 5.0, mark_spans([(1.0, 2.0)]))
    nothing, behind = (cut(audio, 5.0, mark_spans(spans)) for spans in ([], [(late, late)]))
    assert behind == nothing


def test_cuts_fall_into_pauses_and_overlap_only_without_one() -> None:
    talk = [(True, 4.0), (False, 0.5)]
    windows = cut(speech(talk * 6), 10.0)
    assert len(windows) > 2
    for window in windows[1:]:
        assert window.overlap == 0
        assert 4.0 <= window.start % 4.5 <= 4.5
    breathless = cut(speech([(True, 25.0)]), 10.0)
    assert [window.overlap for window in breathless] == [0, 2.5, 2.5]
    assert not any(window.silent for window in breathless)


def test_silence_and_clipping() -> None:
    assert [window.silent for window in cut(np.zeros(RATE * 2, np.float32), 1.5)] == [True, True]
    assert [
        window.seconds for window in cut(np.zeros(RATE * 90, np.float32), 2.0) if window.silent
    ] == [90.0]
    [whisper] = cut(speech([(True, 1.0)], gain=0.004), 2.0)
    assert not whisper.silent
    clipped = np.clip(speech([(True, 4.0), (False, 0.6), (True, 4.0)], gain=50.0), -1, 1)
    [first, second] = cut(clipped, 6.0)
    assert 4.0 < first.end < 4.6
    assert second.overlap == 0


def test_a_rule_of_one_s_own_may_mark_speech() -> None:
    audio = speech([(True, 9.0)])
    is_speech = np.ones(450, dtype=bool)
    is_speech[150:170] = False
    assert (
        cut(audio, 5.0, lambda _: SpeechFlags(is_speech, np.zeros(450, dtype=bool)))[0].end == 3.2
    )


# ---------------------------------------------------------------------------------------------------------- stitching
@st.composite
def streams(draw: st.DrawFn) -> list[Word]:
    """Words as they were really spoken: any of few texts, so that many repeat."""
    words, now = [], draw(st.floats(0, 0.5))
    for _ in range(draw(st.integers(3, 60))):
        length = draw(st.floats(0.15, 0.6))
        words.append(Word(" " + draw(st.sampled_from(TEXTS)), now, now + length))
        now += length + draw(st.sampled_from([0.05, 0.05, 0.3]))
    return words


def heard_in(words: list[Word], window: Window, draw: Any) -> list[TimedSegment]:
    """What a recognizer makes of a window: whole words right but a little displaced, torn ones missing or wrong."""
    found = []
    for word in words:
        if window.start <= word.start and word.end <= window.end:
            found.append(word.moved(draw(st.floats(-0.06, 0.06))))
        elif (
            word.end > window.start + 0.05
            and word.start < window.end - 0.05
            and draw(st.booleans())
        ):
            start, end = max(word.start, window.start), min(word.end, window.end)
            found.append(
                Word(draw(st.sampled_from([" torn", word.text, word.text[:2]])), start, end)
            )
    segments = []
    while found:
        count = draw(st.integers(1, len(found)))
        part, found = found[:count], found[count:]
        segments.append(
            TimedSegment("".join(w.text for w in part), part[0].start, part[-1].end, [], part)
        )
    return segments


@settings(max_examples=75)
@given(streams(), st.sampled_from([6.0, 10.0]), st.data())
def test_stitching_neither_loses_nor_doubles_a_word(
    words: list[Word], longest: float, data: st.DataObject
) -> None:
    total, overlap = words[-1].end, longest / 3
    windows: list[Window] = []
    start = 0.0
    while True:
        windows.append(
            Window(len(windows), start, min(start + longest, total), overlap if start else 0.0)
        )
        if windows[-1].end >= total:
            break
        start = windows[-1].end - overlap
    said: list[TimedSegment] = []
    for window in windows:
        segments = heard_in(words, window, data.draw)
        if window.overlap:
            said, segments = join(said, segments, window.start, window.start + window.overlap)
        said = said + segments
    assert "".join(segment.text for segment in said) == "".join(word.text for word in words)
    assert all("".join(word.text for word in segment.words) == segment.text for segment in said)


def test_an_overlap_that_only_one_has_heard_is_kept() -> None:
    word = Word(" red", 5.0, 5.4)
    segment = TimedSegment(" red", 5.0, 5.4, [7], [word])
    assert join([segment], [], 4.0, 6.0) == ([segment], [])
    assert join([], [segment], 4.0, 6.0) == ([], [segment])


def test_words_that_do_not_match_are_taken_by_their_time() -> None:
    early = TimedSegment(" a b", 4.0, 5.9, [], [Word(" a", 4.0, 4.4), Word(" b", 5.5, 5.9)])
    late = TimedSegment(" c d", 4.1, 5.8, [], [Word(" c", 4.1, 4.5), Word(" d", 5.4, 5.8)])
    left, right = join([early], [late], 4.0, 6.0)
    assert [segment.text for segment in left + right] == [" a", " d"]


# ------------------------------------------------------------------------------------------------------------- stable
@settings(max_examples=75)
@given(streams(), st.data())
def test_the_stable_prefix_only_grows(words: list[Word], data: st.DataObject) -> None:
    """Whatever the hearings say: changing words, words that vanish, times that jump."""
    agreement, before, shown = Agreement(), "", ""
    for _ in range(data.draw(st.integers(1, 12))):
        count = data.draw(st.integers(0, len(words)))
        hearing = [
            Word(data.draw(st.sampled_from(TEXTS)), word.start, word.end)
            if data.draw(st.booleans())
            else word
            for word in words[:count]
        ]
        if data.draw(st.integers(0, 5)) == 0:
            agreement.finalize(hearing, data.draw(st.floats(0, words[-1].end)))
        else:
            agreement.update(hearing)
        shown = agreement.stable_text
        assert shown.startswith(before)
        before = shown
    agreement.finish()
    assert agreement.stable_text.startswith(shown)
    assert agreement.unstable_text == ""


@CALM
@given(streams(), st.data())
def test_what_two_hearings_agree_on_becomes_stable(words: list[Word], data: st.DataObject) -> None:
    """A recognizer that is right except about its last word: the stable text is right, and at the end it is all."""
    agreement = Agreement()
    for count in range(1, len(words) + 1):
        wrong = Word(
            " " + data.draw(st.sampled_from(["um", "er", "ah"])) + str(count),
            *_times(words[count - 1]),
        )
        agreement.update([*words[: count - 1], wrong])
        text = "".join(word.text for word in words)
        assert text.startswith(agreement.stable_text)
        assert len(agreement.stable) >= count - 2
    agreement.finalize(words, float("inf"))
    assert agreement.stable_text == "".join(word.text for word in words)


def _times(word: Word) -> tuple[float, float]:
    return word.start, word.end


def test_each_token_has_the_text_that_it_adds() -> None:
    """A character of two tokens belongs to the second; a special token adds nothing."""
    texts = {1: b" a", 2: b"\xc3", 3: b"\xa9", 9: b""}

    def text_of(tokens: list[int]) -> str:
        return b"".join([texts[token] for token in tokens]).decode("utf-8", "replace")

    segment = TimedSegment(" aé", 0.0, 1.0, [9, 1, 2, 3], [], logprobs=[-9.0, -1.0, -2.0, -3.0])
    assert scored(segment, text_of) == [(" a", -1.0), ("é", -3.0)]
