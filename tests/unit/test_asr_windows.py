"""Cutting and stitching: a long recording loses no word and says none twice; what is stable stays."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from motet_asr.live import Agreement
from motet_asr.request import Piece, Word
from motet_asr.stitch import join
from motet_asr.windows import Window, cut

RATE = 16_000
CALM = settings(deadline=None, max_examples=60)
TEXTS = ("no", "no", "yes", "red", "circle", "a", "the", "square")


def speech(pattern: list[tuple[bool, float]], seed: int = 0, gain: float = 0.1) -> Any:
    """Noise where somebody talks, quiet hiss where nobody does: (talks, seconds) in turn."""
    generator = np.random.default_rng(seed)
    parts = [generator.standard_normal(round(s * RATE)) * (gain if talks else gain / 300) for talks, s in pattern]
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
    windows = cut(audio, longest)
    assert windows[0].start == 0
    assert windows[-1].end == len(audio) / RATE
    assert [window.index for window in windows] == list(range(len(windows)))
    for window in windows:
        assert 0 < window.seconds <= longest + 1e-9
        assert len(window.of(audio)) <= longest * RATE + 1
    for before, after in pairwise(windows):
        assert after.start == before.end - after.overlap
        assert after.end > before.end


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
    assert [window.silent for window in cut(np.zeros(RATE * 3, np.float32), 2.0)] == [True, True]
    [whisper] = cut(speech([(True, 1.0)], gain=0.004), 2.0)
    assert not whisper.silent
    clipped = np.clip(speech([(True, 4.0), (False, 0.6), (True, 4.0)], gain=50.0), -1, 1)
    [first, second] = cut(clipped, 6.0)
    assert 4.0 < first.end < 4.6
    assert second.overlap == 0


def test_a_rule_of_one_s_own_may_mark_speech() -> None:
    audio = speech([(True, 9.0)])
    quiet = np.ones(450, dtype=bool)
    quiet[150:170] = False
    assert cut(audio, 5.0, lambda _: quiet)[0].end == 3.2


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


def heard_in(words: list[Word], window: Window, draw: Any) -> list[Piece]:
    """What a recognizer makes of a window: whole words right but a little displaced, torn ones missing or wrong."""
    found = []
    for word in words:
        if window.start <= word.start and word.end <= window.end:
            found.append(word.moved(draw(st.floats(-0.06, 0.06))))
        elif word.end > window.start + 0.05 and word.start < window.end - 0.05 and draw(st.booleans()):
            start, end = max(word.start, window.start), min(word.end, window.end)
            found.append(Word(draw(st.sampled_from([" torn", word.text, word.text[:2]])), start, end))
    pieces = []
    while found:
        count = draw(st.integers(1, len(found)))
        part, found = found[:count], found[count:]
        pieces.append(Piece("".join(w.text for w in part), part[0].start, part[-1].end, [], part))
    return pieces


@settings(deadline=None, max_examples=150)
@given(streams(), st.sampled_from([6.0, 10.0]), st.data())
def test_stitching_neither_loses_nor_doubles_a_word(words: list[Word], longest: float, data: st.DataObject) -> None:
    total, overlap = words[-1].end, longest / 3
    windows: list[Window] = []
    start = 0.0
    while True:
        windows.append(Window(len(windows), start, min(start + longest, total), overlap if start else 0.0))
        if windows[-1].end >= total:
            break
        start = windows[-1].end - overlap
    said: list[Piece] = []
    for window in windows:
        pieces = heard_in(words, window, data.draw)
        if window.overlap:
            said, pieces = join(said, pieces, window.start, window.start + window.overlap)
        said = said + pieces
    assert "".join(piece.text for piece in said) == "".join(word.text for word in words)
    assert all("".join(word.text for word in piece.words) == piece.text for piece in said)


def test_an_overlap_that_only_one_has_heard_is_kept() -> None:
    word = Word(" red", 5.0, 5.4)
    piece = Piece(" red", 5.0, 5.4, [7], [word])
    assert join([piece], [], 4.0, 6.0) == ([piece], [])
    assert join([], [piece], 4.0, 6.0) == ([], [piece])


def test_words_that_do_not_match_are_taken_by_their_time() -> None:
    early = Piece(" a b", 4.0, 5.9, [], [Word(" a", 4.0, 4.4), Word(" b", 5.5, 5.9)])
    late = Piece(" c d", 4.1, 5.8, [], [Word(" c", 4.1, 4.5), Word(" d", 5.4, 5.8)])
    left, right = join([early], [late], 4.0, 6.0)
    assert [piece.text for piece in left + right] == [" a", " d"]


# ------------------------------------------------------------------------------------------------------------- stable
@settings(deadline=None, max_examples=150)
@given(streams(), st.data())
def test_the_stable_prefix_only_grows(words: list[Word], data: st.DataObject) -> None:
    """Whatever the hearings say: changing words, words that vanish, times that jump."""
    agreement, before, shown = Agreement(), "", ""
    for _ in range(data.draw(st.integers(1, 12))):
        count = data.draw(st.integers(0, len(words)))
        hearing = [
            Word(data.draw(st.sampled_from(TEXTS)), word.start, word.end) if data.draw(st.booleans()) else word
            for word in words[:count]
        ]
        if data.draw(st.integers(0, 5)) == 0:
            agreement.settle(hearing, data.draw(st.floats(0, words[-1].end)))
        else:
            agreement.hear(hearing)
        shown = agreement.stable_text
        assert shown.startswith(before)
        before = shown
    agreement.finish()
    assert agreement.stable_text.startswith(shown)
    assert agreement.tail_text == ""


@CALM
@given(streams(), st.data())
def test_what_two_hearings_agree_on_becomes_stable(words: list[Word], data: st.DataObject) -> None:
    """A recognizer that is right except about its last word: the stable text is right, and at the end it is all."""
    agreement = Agreement()
    for count in range(1, len(words) + 1):
        wrong = Word(" " + data.draw(st.sampled_from(["um", "er", "ah"])) + str(count), *_times(words[count - 1]))
        agreement.hear([*words[: count - 1], wrong])
        text = "".join(word.text for word in words)
        assert text.startswith(agreement.stable_text)
        assert len(agreement.stable) >= count - 2
    agreement.settle(words, float("inf"))
    assert agreement.stable_text == "".join(word.text for word in words)


def _times(word: Word) -> tuple[float, float]:
    return word.start, word.end
