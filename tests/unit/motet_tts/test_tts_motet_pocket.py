"""pocket-tts in the engine: what its own `stream` speaks, and when its words begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from motet_shared.errors import BadRequest, ConfigError
from motet_tts.config import EngineConfig
from motet_tts.engine.engine import Engine
from motet_tts.engine.utterance import StepOutput, Utterance
from motet_tts.models.noise import hash_numbers
from motet_tts.pocket.config import PocketConfig
from motet_tts.pocket.model import PocketSpeech
from support.running.refusals import refuses

CONFIG = PocketConfig(
    voices=("ada", "ben"),
    phonemes=tuple("abcdefghij"),
    codec_width=16,
    codec_layers=2,
    bands=16,
    codes=16,
    codebooks=3,
    latent=8,
    reader_width=32,
    reader_layers=1,
    hidden=32,
    layers=2,
    heads=2,
    kv_heads=1,
    feed_forward=48,
    depth=16,
    max_phonemes=64,
    max_positions=256,
)
TEXTS = ("hello there", "one two three", "a blue star, and a square.")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    model = PocketSpeech(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
        model.speaker.advance.bias.copy_(
            torch.tensor([0.0, 2.0, 0.0, 0.0, 0.0])
        )  # so that it gets on
    path = tmp_path_factory.mktemp("pocket") / "model"
    model.save(path)
    return path


def start(folder: Path, chunk: float = 0.04) -> Engine:
    """An engine whose codec decodes one frame at a time, or more."""
    return Engine(EngineConfig(model=str(folder), first_chunk=0.04, chunk=chunk))


def near(got: Tensor, wanted: Tensor) -> None:
    """To the ear. The phase of a harmonic adds up the pitch, so that a rounding of it grows; loudness stays."""
    assert got.shape == wanted.shape
    level = float(wanted.square().mean().sqrt())
    assert level > 0.01
    assert float((got - wanted).square().mean().sqrt()) < 0.1 * level


def utterance(text: str, voice: str = "ada", **fields: Any) -> Utterance:
    return Utterance(words=tuple(text.split()), voice=voice, **fields)


def finish(engine: Engine) -> dict[Any, list[StepOutput]]:
    pieces: dict[Any, list[StepOutput]] = {}
    while engine.has_work:
        for piece in engine.step():
            pieces.setdefault(piece.key, []).append(piece)
        engine.check_integrity()
    return pieces


def joined(pieces: list[StepOutput]) -> Tensor:
    return torch.cat([piece.samples for piece in pieces if piece.samples is not None])


def reference(folder: Path, text: str, voice: str, rate: float = 1.0) -> tuple[Tensor, list[int]]:
    """The samples, and for each word the sample at which it begins."""
    model = PocketSpeech.load(folder)
    starts: list[int] = []
    begins, at = [0], 0
    for word in text.split()[:-1]:
        begins.append(begins[-1] + len(word) + 1)
    samples = []
    for spoken in model.stream(text, voice, rate=rate, seed=hash_numbers(0, 0) >> 24):
        while len(starts) < len(begins) and any(
            character >= begins[len(starts)] for character in spoken.began
        ):
            starts.append(at)
        samples.append(spoken.samples)
        at += len(spoken.samples)
    return torch.cat(samples), starts


@pytest.mark.parametrize(("rate", "chunk"), [(0.8, 0.04), (1.0, 0.32)])
def test_in_company_it_is_what_the_model_speaks(folder: Path, rate: float, chunk: float) -> None:
    engine = start(folder, chunk)
    assert engine.voices == ("ada", "ben")
    found: dict[Any, list[StepOutput]] = {}
    for number, text in enumerate(TEXTS):
        engine.add(number, utterance(text, CONFIG.voices[number % 2], speed=rate))
        for piece in engine.step():
            found.setdefault(piece.key, []).append(piece)
    for number, pieces in finish(engine).items():
        found.setdefault(number, []).extend(pieces)
    for number, pieces in found.items():
        samples, _ = reference(folder, TEXTS[number], CONFIG.voices[number % 2], rate)
        near(joined(pieces), samples)


def test_it_knows_when_its_words_begin(folder: Path) -> None:
    engine = start(folder)
    engine.add("a", utterance(TEXTS[1]))
    pieces = finish(engine)["a"]
    starts = pieces[-1].starts
    assert starts is not None
    samples, wanted = reference(folder, TEXTS[1], "ada")
    assert list(starts[: len(wanted)]) == wanted
    assert all(start == len(samples) for start in starts[len(wanted) :])
    torch.testing.assert_close(joined(pieces), samples, rtol=0, atol=1e-4)


def test_what_it_cannot_speak(folder: Path, tmp_path: Path) -> None:
    engine = start(folder)
    engine.add("long", utterance("abc " * 200))
    (piece,) = finish(engine)["long"]
    assert isinstance(piece.error, BadRequest) or piece.done
    with refuses(ConfigError, "dtype"):
        Engine(EngineConfig(model=str(folder), dtype="bfloat16"))
    CONFIG.save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(
        (folder / "config.json").read_text().replace('"layers": 2', '"layers": 3')
    )
    with refuses(ConfigError, "model"):
        start(tmp_path)
