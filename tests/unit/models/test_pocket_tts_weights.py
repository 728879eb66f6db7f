"""Test the committed pocket-tts weights: phonemes, voices, word starts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

torch = pytest.importorskip("torch")
pytest.importorskip("espeakng_loader")

from torch import Tensor  # noqa: E402

from motet_tts.pocket.model import PocketSpeech  # noqa: E402
from recipes.asr.evaluate import edit_distance  # noqa: E402
from recipes.tts.data import Recording, example, held_out_text, record  # noqa: E402
from recipes.tts.features import bands, pitch  # noqa: E402
from recipes.tts.recipe import Recipe  # noqa: E402

FOLDER = Path(__file__).parents[3] / "models" / "pocket-tts"
RECIPE = Recipe()
SENTENCES = [
    held_out_text(category, 7) for category in ("description", "question", "answer", "general")
]
Frames = NDArray[np.float32]


@pytest.fixture(scope="module")
def model() -> PocketSpeech:
    return PocketSpeech.load(FOLDER)


def recorded(text: str, voice: int) -> Recording:
    """Return the sentence as espeak-ng speaks it."""
    return record(RECIPE, text, voice, 1.0)


def spoken_by_espeak(model: PocketSpeech, text: str, voice: int) -> Tensor:
    samples = example(model.config, recorded(text, voice)).samples
    assert samples is not None
    return samples


def log_bands(model: PocketSpeech, samples: Tensor) -> Frames:
    """Return coarse log bands every ten milliseconds, without their mean."""
    config = model.config
    found = bands(samples, config.sample_rate, config.hop, 24).clamp(min=-10)
    return (found - found.mean()).numpy()


def warped_distance(one: Frames, other: Frames) -> float:
    """Return the distance per frame after dynamic time warping, which removes differences of speed."""
    costs = np.abs(one[:, None] - other[None]).mean(-1)
    row = np.full(len(other) + 1, np.inf)
    row[0] = 0.0
    for cost in costs:
        last, diagonal = np.inf, row[:-1].copy()
        best = np.minimum(diagonal, row[1:]) + cost
        row[0] = np.inf
        for j, value in enumerate(best):
            last = row[j + 1] = min(value, last + cost[j])
    return float(row[-1] / (len(one) + len(other)))


def test_its_size(model: PocketSpeech) -> None:
    assert sum(parameter.numel() for parameter in model.parameters()) <= 12_000_000
    assert (FOLDER / "model.safetensors").stat().st_size <= 24_000_000
    assert model.config.voices == tuple(RECIPE.voices)


def test_held_out_sentences_are_phonemized(model: PocketSpeech) -> None:
    wrong = total = 0
    for number, text in enumerate(SENTENCES):
        wanted = [phoneme.name for phoneme in recorded(text, number).phonemes]
        read = model.read(text, model.config.voices[number]).phonemes
        wrong += edit_distance(wanted, [model.config.phonemes[phoneme] for phoneme in read])
        total += len(wanted)
    assert wrong <= 0.1 * total


@pytest.mark.extended("families", after=1)
@pytest.mark.parametrize("voice", range(len(RECIPE.voices)))
def test_a_voice_says_what_espeak_says_and_nothing_else(model: PocketSpeech, voice: int) -> None:
    name = model.config.voices[voice]
    own = [
        log_bands(model, torch.cat([spoken.samples for spoken in model.stream(text, name)]))
        for text in SENTENCES
    ]
    others = [log_bands(model, spoken_by_espeak(model, text, voice)) for text in SENTENCES]
    for number, frames in enumerate(own):
        assert 0.75 < len(frames) / len(others[number]) < 1.33
        distances = [warped_distance(frames, other) for other in others]
        assert distances[number] == min(distances)
        assert distances[number] < 0.75 * min(distances[:number] + distances[number + 1 :])


@pytest.mark.long
def test_a_voice_is_loud_enough_has_a_pitch_and_pauses(model: PocketSpeech) -> None:
    medians = []
    for name in model.config.voices:
        samples = torch.cat([spoken.samples for spoken in model.stream(SENTENCES[0], name)]).numpy()
        hertz = pitch(samples, model.config.sample_rate, model.config.hop)
        level = np.sqrt(np.mean(np.square(samples).reshape(-1, model.config.hop), axis=1))
        assert 0.03 < np.sqrt(np.mean(samples**2)) < 0.25
        assert np.mean(np.abs(samples) > 1.0) < 1e-3
        assert 0.35 < np.mean(hertz > 0) < 0.95
        assert np.mean(level < 0.1 * level.max()) > 0.05
        medians.append(float(np.median(hertz[hertz > 0])))
    assert all(60 < median < 350 for median in medians)
    assert max(medians) > 1.3 * min(medians)


def test_words_begin_when_they_are_spoken(model: PocketSpeech) -> None:
    text = SENTENCES[0]
    marks = recorded(text, 0).speech
    begins: dict[int, float] = {}
    for frame, spoken in enumerate(model.stream(text, "ada")):
        for character in spoken.began:
            word = text.rfind(" ", 0, character + 1) + 1
            begins.setdefault(word, frame / model.config.frame_rate)
    wanted = {mark.character: mark.second for mark in marks.words}
    shared = sorted(begins.keys() & wanted.keys())
    assert len(shared) >= 0.8 * len(wanted)
    assert all(before < after for before, after in pairwise(begins[word] for word in shared))
    assert np.mean([abs(begins[word] - wanted[word]) for word in shared]) < 0.25


@pytest.mark.long
def test_a_higher_rate_is_sooner_done(model: PocketSpeech) -> None:
    slow, usual, fast = (
        len(list(model.stream(SENTENCES[0], "ben", rate=rate))) for rate in (0.8, 1.0, 1.35)
    )
    assert slow > usual > fast


def test_a_stream_is_the_whole_sentence(model: PocketSpeech) -> None:
    """Decode frames one at a time and all codes at once, and compare."""
    codec, features = model.codec, example(model.config, recorded(SENTENCES[1], 1)).features
    with torch.inference_mode():
        codes = codec.quantizer(codec.encoder(features[None]))[0]
    whole = codec.decode([codec.begin(5)], codes)[0]
    state = codec.begin(5)
    pieces = torch.cat(
        [codec.decode([state], codes[:, n : n + 1])[0] for n in range(codes.shape[1])]
    )
    level = float(whole.square().mean().sqrt())
    assert level > 0.02
    assert float((whole - pieces).square().mean().sqrt()) < 0.02 * level
