"""Vectors to clusters, clusters to turns, turns to the words of a transcript."""

from __future__ import annotations

import math
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet_pipelines.voice.clustering import MOST, cluster, cosine, mean
from motet_pipelines.voice.diarize import (
    STEP,
    WINDOW,
    Known,
    Turn,
    identify,
    speaker_at,
    turns,
    windows,
)
from motet_pipelines.voice.diarized_transcript import _SpeakerNames, letters
from motet_shared.messages import Segment

CALM = settings(max_examples=80)
SIZE = 32


def crowd(
    people: int, spread: float = 0.5, seed: int = 0
) -> tuple[np.ndarray, np.random.Generator]:
    """Directions that are far from each other, and noise."""
    rng = np.random.default_rng(seed)
    directions, _ = np.linalg.qr(rng.standard_normal((SIZE, people)))
    return directions.T, rng


def voiced(direction: np.ndarray, rng: np.random.Generator, noise: float = 0.5) -> list[float]:
    """How somebody sounds this time: a cosine of about 0.9 to the direction."""
    other = rng.standard_normal(SIZE)
    vector = direction + noise * other / np.linalg.norm(other)
    return list(vector / np.linalg.norm(vector))


@CALM
@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(0, 99))
def test_those_who_sound_alike_are_one(who: list[int], seed: int) -> None:
    people, rng = crowd(5, seed=seed)
    found = cluster([voiced(people[one], rng) for one in who], [1.0] * len(who), 0.45)
    assert found[0] == 0
    for index, number in enumerate(found):
        assert number <= max(found[:index], default=-1) + 1, "numbers go by first appearance"
    assert {(a, b) for a, b in zip(who, found, strict=True)} == set(
        dict(zip(who, found, strict=True)).items()
    )
    assert len(set(found)) == len(set(who))


def test_the_average_cosine_decides() -> None:
    """Against a plain rendering of the definition."""
    rng = np.random.default_rng(3)
    vectors = [list(v / np.linalg.norm(v)) for v in rng.standard_normal((30, 4))]
    groups = [[i] for i in range(30)]
    while True:
        pairs = [
            (float(np.mean([cosine(vectors[i], vectors[j]) for i in a for j in b])), m, n)
            for m, a in enumerate(groups)
            for n, b in enumerate(groups)
            if m < n
        ]
        best, m, n = max(pairs)
        if best < 0.3:
            break
        groups[m] += groups.pop(n)
    found = cluster(vectors, [1.0] * 30, 0.3)
    assert {frozenset(group) for group in groups} == {
        frozenset(i for i in range(30) if found[i] == number) for number in set(found)
    }


def test_many_vectors_are_as_few() -> None:
    """Hours of them; the fourth person comes late, and between two of those that are compared first."""
    people, rng = crowd(4)
    count = MOST * 4
    who = [number % 3 for number in range(count)]
    who[count // 2 + 1] = who[count // 2 + 2] = 3
    found = cluster([voiced(people[one], rng) for one in who], [1.0] * count, 0.45)
    assert found == who


def test_none_and_one() -> None:
    assert cluster([], [], 0.5) == []
    assert cluster([[1.0, 0.0]], [0.0], 0.5) == [0]
    assert mean([[1.0, 0.0], [-1.0, 0.0]]) == [0.0, 0.0]


@CALM
@given(st.lists(st.tuples(st.floats(0.01, 3), st.floats(0.02, 20)), max_size=20))
def test_windows_cover_the_speech(gaps: list[tuple[float, float]]) -> None:
    speech, now = [], 0.0
    for gap, length in gaps:
        speech.append((now + gap, now + gap + length))
        now += gap + length
    found = windows(speech)
    assert found == sorted(found)
    for start, end in speech:
        own = [one for one in found if start - 1e-9 <= one[0] and one[1] <= end + 1e-9]
        assert own[0][0] == pytest.approx(start)
        assert own[-1][1] == pytest.approx(end)
        for one, after in pairwise(own):
            assert after[0] - one[0] <= STEP + 1e-9
            assert after[0] < one[1]
        assert all(b - a <= WINDOW + 1e-9 for a, b in own)
    assert len(found) <= sum(1 + math.ceil(max(0.0, b - a - WINDOW) / STEP) for a, b in speech)


def spoken(speech: list[tuple[float, float, int]], people: int) -> list[Turn]:
    """Turns of speech whose windows sound like the one who speaks most in them."""
    directions, rng = crowd(people)
    heard = windows([(a, b) for a, b, _ in speech])
    due = [Turn(who, a, b) for a, b, who in speech]
    vectors = [voiced(directions[speaker_at(due, a, b)], rng) for a, b in heard]
    return turns([(a, b) for a, b, _ in speech], vectors, 0.45)


def test_speech_becomes_turns() -> None:
    found = spoken([(0.5, 4.5, 2), (5.0, 9.0, 1), (9.4, 9.8, 1), (10.5, 13.0, 2)], 3)
    due = [Turn(0, 0.5, 4.5), Turn(1, 5.0, 9.0), Turn(1, 9.4, 9.8), Turn(0, 10.5, 13.0)]
    assert [turn.speaker for turn in found] == [turn.speaker for turn in due]
    assert [turn[1:] for turn in found] == [pytest.approx(turn[1:]) for turn in due]
    assert turns([], [], 0.5) == []


def test_who_hardly_speaks_and_sounds_alike_is_somebody_else() -> None:
    """Seven tenths of a second with a cosine that is a little too low; and the same that is like nobody."""
    people, _ = crowd(2)
    speech = [(0.0, 6.0), (7.0, 7.9)]
    heard = windows(speech)
    near = [0.6 * a + 0.8 * b for a, b in zip(people[0], people[1], strict=True)]
    for last, count in ((near, 1), (list(people[1]), 2)):
        vectors = [list(people[0])] * (len(heard) - 1) + [last]
        assert len({turn.speaker for turn in turns(speech, vectors, 0.7)}) == count


def test_the_known_are_called_by_their_names() -> None:
    people, rng = crowd(3)
    speech = [(0.0, 4.0), (5.0, 9.0)]
    heard = windows(speech)
    vectors = [voiced(people[0 if b <= 4.0 else 1], rng) for _, b in heard]
    found = turns(speech, vectors, 0.45)
    known = [Known("Ann", people[1]), Known("Bob", people[2])]
    assert identify(found, speech, vectors, known, 0.45) == {1: "Ann"}
    assert identify(found, speech, vectors, [], 0.45) == {}


def test_words_go_to_who_speaks_then() -> None:
    said = [Turn(0, 1.0, 2.0), Turn(1, 2.0, 4.0), Turn(0, 6.0, 7.0)]
    assert [
        speaker_at(said, a, b)
        for a, b in ((1.0, 1.5), (1.9, 2.3), (1.5, 2.1), (5.5, 5.9), (4.1, 4.2), (9, 9))
    ] == [*(0, 1, 0, 0, 1, 0)]
    assert speaker_at(said, 0.0, 0.5) == 0
    assert speaker_at([], 1.0, 2.0) == 0


def test_a_segment_is_split_where_the_speaker_changes() -> None:
    said = [Turn(3, 0.0, 2.0), Turn(7, 2.5, 4.0)]
    words = [(" Two", 0.1, 0.5), (" stars.", 0.6, 1.4), (" Yes.", 2.6, 3.0)]
    script = _SpeakerNames(said, {7: "A"})
    parts = list(script.parts(Segment(4, 1, 0.0, 3.0, " Two stars. Yes.", words=words)))
    assert [(part.speaker, part.segment.text, part.segment.id) for part in parts] == [
        *(("B", " Two stars.", 0), ("A", " Yes.", 1))
    ]
    assert [(part.segment.start, part.segment.end) for part in parts] == [(0.1, 1.4), (2.6, 3.0)]
    [whole] = script.parts(Segment(5, 2, 2.2, 3.5, " Well."))
    assert (whole.speaker, whole.segment.id) == ("A", 2)


def test_letters_go_on_after_z() -> None:
    names = list(islice(letters({"B"}), 60))
    assert names[:3] == ["A", "C", "D"]
    assert names[25:28] == ["AA", "AB", "AC"]
    assert len(set(names)) == 60
