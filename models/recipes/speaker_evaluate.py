"""How well speakers are told apart: equal error rate of pairs, and diarization error rate of whole dialogues.

    python models/recipes/speaker_evaluate.py models/pocket-speakers

People, sentences and noise are held out. A dialogue goes the whole way that a file goes: silero-vad marks the speech,
the encoder compares it, the pipeline clusters it.
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
from speaker_data import HEARD, Dialogue, Turn, dialogue, held_out_people, person, utterances
from speech_noise import CLEAN, Conditions, Wave
from speech_sentences import HELD_OUT_SEEDS

COLLAR = 0.25  # seconds around a change of speaker that do not count, as usual
GRID = 0.01  # seconds


class Pairs(NamedTuple):
    same: Floats
    other: Floats


def held_out_waves(people: int, sentences: int, first: int = 0) -> list[list[Wave]]:
    """Sentences of held-out people, by person."""
    seed = HELD_OUT_SEEDS[first]
    crowd = held_out_people(Random(f"{seed}/people"), people)
    return [
        utterances(who, sentences, (seed, number), held_out=True)
        for number, who in enumerate(crowd)
    ]


def pairs(encoder: SpeakerEncoder, waves: list[list[Wave]], variants: int, seconds: float) -> Pairs:
    """Cosines of two stretches of one person, and of two people of different variants (every `variants`th is alike)."""
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
    """The rate at which as many pairs of one person are refused as pairs of two are taken for one, and the cosine."""
    limits = np.sort(np.concatenate([found.same, found.other]))
    refused = np.searchsorted(np.sort(found.same), limits) / len(found.same)
    taken = 1 - np.searchsorted(np.sort(found.other), limits) / len(found.other)
    place = int(np.argmin(np.abs(refused - taken)))
    return float((refused[place] + taken[place]) / 2), float(limits[place])


def speech_in(wave: Wave, silero: Silero) -> list[diarize.Span]:
    """Spans of speech as motet-vad marks them in a file."""
    edges, memory, found = (
        Edges(Detect(silence_duration_ms=100, prefix_padding_ms=0)),
        StreamState(),
        [],
    )
    padded = np.pad(wave, (0, -len(wave) % FRAME)).reshape(-1, FRAME)
    for number, frame in enumerate(padded):
        [probability] = silero.step([frame], [memory])
        found.append(edges.frame(probability, number * FRAME_MS, (number + 1) * FRAME_MS))
    told = [edge for edge in (*found, edges.finish(len(padded) * FRAME_MS)) if edge is not None]
    return [(a.ms / 1000, b.speech_ms / 1000) for a, b in zip(told[::2], told[1::2], strict=True)]


def vectors_of(
    encoder: SpeakerEncoder, wave: Wave, spans: Sequence[diarize.Span]
) -> list[list[float]]:
    heard = [
        features(wave[int(start * RATE) : max(int(end * RATE), int(start * RATE) + 1)])
        for start, end in spans
    ]
    return encoder.encode(heard).tolist() if heard else []


def error_rate(truth: Sequence[Turn], found: Sequence[diarize.Turn]) -> float:
    """Seconds that are missed, made up or given to somebody else, by the seconds of speech; COLLAR left out."""
    count = int(max(end for _, _, end in (*truth, *found)) / GRID) + 1
    due, said, counts = np.full(count, -1), np.full(count, -1), np.ones(count, bool)
    for turn in truth:
        due[int(turn.start / GRID) : int(turn.end / GRID)] = turn.who
        for edge in (turn.start, turn.end):
            counts[max(0, int((edge - COLLAR) / GRID)) : int((edge + COLLAR) / GRID)] = False
    for one in found:
        said[int(one.start / GRID) : int(one.end / GRID)] = one.speaker
    due, said = due[counts], said[counts]
    names, labels = sorted(set(due) - {-1}), sorted(set(said) - {-1})
    table = np.array(
        [[np.sum((due == name) & (said == label)) for label in labels] for name in names]
    )
    table = np.pad(
        table.reshape(len(names), len(labels)), ((0, 0), (0, max(0, len(names) - len(labels))))
    )
    orders = permutations(range(table.shape[1]), len(names))
    best = max(sum(table[i, j] for i, j in enumerate(order)) for order in orders)
    wrong = np.sum((due != -1) | (said != -1)) - best
    return float(wrong / max(1, np.sum(due != -1)))


class Heard(NamedTuple):
    """A dialogue with everything that does not depend on the threshold."""

    made: Dialogue
    spans: list[diarize.Span]
    vectors: list[list[float]]


def hear(encoder: SpeakerEncoder, made: Dialogue, silero: Silero) -> Heard:
    spans = speech_in(made.wave, silero)
    return Heard(made, spans, vectors_of(encoder, made.wave, diarize.windows(spans)))


def diarization(heard: Sequence[Heard], alike: float) -> tuple[float, float]:
    """Mean error rate, and the share of the dialogues with the right number of speakers."""
    rates, right = [], []
    for one in heard:
        found = diarize.turns(one.spans, one.vectors, alike)
        rates.append(error_rate(one.made.turns, found))
        right.append(
            len({turn.speaker for turn in found}) == len({turn.who for turn in one.made.turns})
        )
    return float(np.mean(rates)), float(np.mean(right))


def best_threshold(encoder: SpeakerEncoder, dialogues: int = 24) -> float:
    """The cosine with the least error on dialogues of people as in training, one to four of them."""
    silero, rng = Silero(), Random("threshold")
    heard = []
    for number in range(dialogues):
        people = [person(rng) for _ in range(1 + number % 4)]
        heard.append(hear(encoder, dialogue(people, rng, 8), silero))
    limits = np.round(np.arange(0.2, 0.8, 0.02), 2)
    rates = np.array([diarization(heard, float(limit))[0] for limit in limits])
    return float(np.round(limits[rates <= rates.min() + 0.002].mean(), 3))


def held_out_dialogues(speakers: int, count: int, conditions: Conditions) -> list[Dialogue]:
    rng = Random(f"{HELD_OUT_SEEDS[1]}/{speakers}")
    return [dialogue(held_out_people(rng, speakers), rng, 10, conditions) for _ in range(count)]


def report(
    encoder: SpeakerEncoder, people: int = 40, sentences: int = 8, dialogues: int = 20
) -> dict[str, Any]:
    """All scores, rounded."""
    waves, silero = held_out_waves(people, sentences), Silero()
    found: dict[str, Any] = {"alike": encoder.shape.alike}
    for seconds in (1.5, 3.0):
        rate, limit = equal_error(pairs(encoder, waves, 10, seconds))
        found[f"equal error, {seconds} s"] = {"rate": round(rate, 4), "at": round(limit, 3)}
    for speakers in (1, 2, 3):
        for name, conditions in (("clean", CLEAN), ("normal", HEARD)):
            heard = [
                hear(encoder, made, silero)
                for made in held_out_dialogues(speakers, dialogues, conditions)
            ]
            rate, right = diarization(heard, encoder.shape.alike)
            found[f"{speakers} speakers, {name}"] = {
                "error": round(rate, 4),
                "right number": round(right, 3),
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
