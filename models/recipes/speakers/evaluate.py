"""Score a speaker encoder: equal error rate of pairs, diarization error rate of dialogues.

python models/recipes speakers.evaluate models/pocket-speakers

Speakers, sentences and noise are held out. A dialogue takes the same path as an uploaded file:
silero-vad detects the speech, the encoder embeds it, the pipeline clusters it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import combinations, permutations
from random import Random
from typing import Any, NamedTuple

import numpy as np

from motet_pipelines.voice import diarize
from motet_shared.messages import Detect
from motet_speakers.encoder import SpeakerEncoder
from motet_speakers.features import Floats, features
from motet_vad.edges import Edges
from motet_vad.model import FRAME, FRAME_MS, RATE, Silero, StreamState
from recipes.speakers.data import (
    DETECTED,
    Dialogue,
    Turn,
    dialogue,
    held_out_people,
    person,
    utterances,
)
from recipes.speech.noise import CLEAN, Conditions, Wave
from recipes.training.held_out_seeds import HELD_OUT_SEEDS

COLLAR = 0.25  # seconds excluded around each speaker change, as is usual
GRID = 0.01  # seconds per evaluated frame


class Pairs(NamedTuple):
    """Hold cosine similarities of same-speaker and different-speaker pairs."""

    same: Floats
    other: Floats


def held_out_waves(people: int, sentences: int, first: int = 0) -> list[list[Wave]]:
    """Return sentences of held-out speakers, by speaker."""
    seed = HELD_OUT_SEEDS[first]
    speakers = held_out_people(Random(f"{seed}/people"), people)
    return [
        utterances(speaker, sentences, (seed, number), held_out=True)
        for number, speaker in enumerate(speakers)
    ]


def pairs(encoder: SpeakerEncoder, waves: list[list[Wave]], variants: int, seconds: float) -> Pairs:
    """Return the similarities of pairs of stretches of `seconds`.

    Different-speaker pairs exclude those of one variant, which every `variants`th speaker shares.
    """
    count = int(seconds * RATE)
    cut = [[wave[max(0, (len(wave) - count) // 2) :][:count] for wave in own] for own in waves]
    vectors = [encoder.encode([features(wave) for wave in own]) for own in cut]
    same = [float(a @ b) for own in vectors for a, b in combinations(own, 2)]
    other = [
        (vectors[one] @ vectors[two].T).ravel()
        for one, two in combinations(range(len(vectors)), 2)
        if (one - two) % variants
    ]
    return Pairs(np.array(same, np.float32), np.concatenate(other))


def equal_error(found: Pairs) -> tuple[float, float]:
    """Return the equal error rate and the similarity threshold that gives it."""
    thresholds = np.sort(np.concatenate([found.same, found.other]))
    false_rejections = np.searchsorted(np.sort(found.same), thresholds) / len(found.same)
    false_acceptances = 1 - np.searchsorted(np.sort(found.other), thresholds) / len(found.other)
    place = int(np.argmin(np.abs(false_rejections - false_acceptances)))
    return float((false_rejections[place] + false_acceptances[place]) / 2), float(thresholds[place])


def speech_in(wave: Wave, silero: Silero) -> list[diarize.Span]:
    """Return the spans of speech that motet-vad detects in a file, in seconds."""
    edges, memory, found = (
        Edges(Detect(silence_duration_ms=100, prefix_padding_ms=0)),
        StreamState(),
        [],
    )
    padded = np.pad(wave, (0, -len(wave) % FRAME)).reshape(-1, FRAME)
    for number, frame in enumerate(padded):
        [probability] = silero.step([frame], [memory])
        found.append(edges.frame(probability, number * FRAME_MS, (number + 1) * FRAME_MS))
    marked = [edge for edge in (*found, edges.finish(len(padded) * FRAME_MS)) if edge is not None]
    return [
        (a.ms / 1000, b.speech_ms / 1000) for a, b in zip(marked[::2], marked[1::2], strict=True)
    ]


def vectors_of(
    encoder: SpeakerEncoder, wave: Wave, spans: Sequence[diarize.Span]
) -> list[list[float]]:
    """Return the vectors of spans of a recording."""
    stretches = [
        features(wave[int(start * RATE) : max(int(end * RATE), int(start * RATE) + 1)])
        for start, end in spans
    ]
    return encoder.encode(stretches).tolist() if stretches else []


def error_rate(truth: Sequence[Turn], found: Sequence[diarize.Turn]) -> float:
    """Return the diarization error rate without COLLAR.

    Missed, false and confused seconds over seconds of speech.
    """
    count = int(max(end for _, _, end in (*truth, *found)) / GRID) + 1
    reference, hypothesis, counts = np.full(count, -1), np.full(count, -1), np.ones(count, bool)
    for turn in truth:
        reference[int(turn.start / GRID) : int(turn.end / GRID)] = turn.speaker
        for edge in (turn.start, turn.end):
            counts[max(0, int((edge - COLLAR) / GRID)) : int((edge + COLLAR) / GRID)] = False
    for one in found:
        hypothesis[int(one.start / GRID) : int(one.end / GRID)] = one.speaker
    reference, hypothesis = reference[counts], hypothesis[counts]
    names, labels = sorted(set(reference) - {-1}), sorted(set(hypothesis) - {-1})
    table = np.array(
        [
            [np.sum((reference == name) & (hypothesis == label)) for label in labels]
            for name in names
        ]
    )
    table = np.pad(
        table.reshape(len(names), len(labels)), ((0, 0), (0, max(0, len(names) - len(labels))))
    )
    orders = permutations(range(table.shape[1]), len(names))
    best = max(sum(table[i, j] for i, j in enumerate(order)) for order in orders)
    wrong = np.sum((reference != -1) | (hypothesis != -1)) - best
    return float(wrong / max(1, np.sum(reference != -1)))


class PreparedDialogue(NamedTuple):
    """Hold a dialogue with its spans and vectors, which do not depend on the threshold."""

    dialogue: Dialogue
    spans: list[diarize.Span]
    vectors: list[list[float]]


def prepare(encoder: SpeakerEncoder, spoken: Dialogue, silero: Silero) -> PreparedDialogue:
    """Detect the speech of a dialogue and embed it."""
    spans = speech_in(spoken.wave, silero)
    return PreparedDialogue(spoken, spans, vectors_of(encoder, spoken.wave, diarize.windows(spans)))


def diarization(prepared: Sequence[PreparedDialogue], threshold: float) -> tuple[float, float]:
    """Return the mean error rate, and the share of dialogues with the correct speaker count."""
    rates, correct = [], []
    for one in prepared:
        found = diarize.turns(one.spans, one.vectors, threshold)
        rates.append(error_rate(one.dialogue.turns, found))
        correct.append(
            len({turn.speaker for turn in found})
            == len({turn.speaker for turn in one.dialogue.turns})
        )
    return float(np.mean(rates)), float(np.mean(correct))


def best_threshold(encoder: SpeakerEncoder, dialogues: int = 24) -> float:
    """Return the threshold of least error on dialogues of one to four training speakers."""
    silero, rng = Silero(), Random("threshold")
    prepared = []
    for number in range(dialogues):
        people = [person(rng) for _ in range(1 + number % 4)]
        prepared.append(prepare(encoder, dialogue(people, rng, 8), silero))
    limits = np.round(np.arange(0.2, 0.8, 0.02), 2)
    rates = np.array([diarization(prepared, float(limit))[0] for limit in limits])
    return float(np.round(limits[rates <= rates.min() + 0.002].mean(), 3))


def held_out_dialogues(speakers: int, count: int, conditions: Conditions) -> list[Dialogue]:
    """Make dialogues of held-out speakers."""
    rng = Random(f"{HELD_OUT_SEEDS[1]}/{speakers}")
    return [dialogue(held_out_people(rng, speakers), rng, 10, conditions) for _ in range(count)]


def report(
    encoder: SpeakerEncoder, people: int = 40, sentences: int = 8, dialogues: int = 20
) -> dict[str, Any]:
    """Return all scores, rounded."""
    waves, silero = held_out_waves(people, sentences), Silero()
    found: dict[str, Any] = {"threshold": encoder.shape.alike}
    for seconds in (1.5, 3.0):
        rate, limit = equal_error(pairs(encoder, waves, 10, seconds))
        found[f"equal error, {seconds} s"] = {"rate": round(rate, 4), "at": round(limit, 3)}
    for speakers in (1, 2, 3):
        for name, conditions in (("clean", CLEAN), ("normal", DETECTED)):
            prepared = [
                prepare(encoder, made, silero)
                for made in held_out_dialogues(speakers, dialogues, conditions)
            ]
            rate, correct = diarization(prepared, encoder.shape.alike)
            found[f"{speakers} speakers, {name}"] = {
                "error": round(rate, 4),
                "right number": round(correct, 3),
            }
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of the speaker encoder")
    args = parser.parse_args(argv)
    print(json.dumps(report(SpeakerEncoder.load(args.model)), indent=1))


if __name__ == "__main__":
    main()
