"""The speakers service: features, network, stretches of files, the actor; and the weights that are committed."""

from __future__ import annotations

import json
from array import array
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torchaudio
from hypothesis import given, settings
from hypothesis import strategies as st
from torchaudio.compliance.kaldi import get_mel_banks

from motet_media.audio import wav_header
from motet_media.sound_file import RATE
from motet_pipelines.voice.diarized_transcript import voices
from motet_pipelines.voice.transcribe import NO_AUDIO
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import BadRequest, ConfigError, Unavailable, UnknownModel
from motet_shared.messages import EmbedSpeakers
from motet_shared.testing import MemoryHub, die, memory_bus, running, settle
from motet_shared.wire.bus import Bus
from motet_speakers.config import SpeakersConfig
from motet_speakers.encoder import Shape, SpeakerEncoder
from motet_speakers.features import BANDS, HOP, SPECTRUM, WINDOW, features
from motet_speakers.service import Speakers
from motet_speakers.stretches import check, stretches
from recipes.speakers import data as speaker_data
from recipes.speakers import evaluate as speaker_evaluate
from recipes.speakers import train as pocket_speakers
from recipes.training.errors import RecipeError
from recipes.training.held_out_seeds import HELD_OUT_SEEDS
from support.media.spoken import say
from support.running.refusals import refuses

FOLDER = Path(__file__).parents[3] / "models" / "pocket-speakers"
SMALL = Shape(width=16, dilations=(1, 2), pooled=24, size=8, alike=0.4)


def network(shape: Shape = SMALL, seed: int = 0) -> pocket_speakers.Network:
    """Random, with normalizations that have seen something."""
    torch.manual_seed(seed)
    made = pocket_speakers.Network(shape)
    with torch.no_grad():
        made.worth.normal_()
    made.train()
    for _ in range(20):
        made(torch.randn(8, 60, BANDS))
    return made.eval()


def sound(seconds: float, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).normal(0, 0.1, int(seconds * RATE)).astype(np.float32)


# ---------------------------------------------------------------------------------------------------------- the network
@pytest.mark.parametrize("frames", [7, 40, 151])
def test_numpy_computes_what_torch_learned(frames: int) -> None:
    trained = network()
    x = torch.randn(5, frames, BANDS)
    with torch.no_grad():
        due = trained(x).numpy()
    assert np.allclose(trained.export("x").encode(list(x.numpy())), due, atol=2e-5)


def test_stretches_of_all_lengths_are_encoded_as_alone() -> None:
    encoder = network().export("x")
    heard = [
        features(sound(seconds, n)) for n, seconds in enumerate((0.5, 1.6, 1.6, 0.01, 3.0, 1.6))
    ]
    together = encoder.encode(heard)
    assert np.allclose(
        together, np.concatenate([encoder.encode([one]) for one in heard]), atol=1e-5
    )
    assert np.allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)


def test_features_do_not_know_the_level() -> None:
    speech = np.frombuffer(say("Two red circles.", RATE), "<i2").astype(np.float32) / np.float32(
        32768
    )
    assert np.allclose(features(speech), features(speech * np.float32(0.05)), atol=2e-3)
    assert features(speech).shape == ((len(speech) - 400) // HOP + 1, BANDS)
    assert np.abs(features(np.zeros(RATE, np.float32))).max() < 1e-3, "silence is like nobody"
    assert len(features(np.ones(1, np.float32))) == len(features(sound(0.4)))


def test_features_are_torchaudio_s_spectra_and_kaldi_s_bands() -> None:
    sound = (0.1 * np.random.default_rng(3).standard_normal(2 * RATE)).astype(np.float32)
    found = features(sound)
    left = (SPECTRUM - WINDOW) // 2  # the window is in the middle of what is transformed
    power = torchaudio.functional.spectrogram(
        torch.nn.functional.pad(torch.from_numpy(sound), (left, left)),
        0,
        torch.hann_window(WINDOW, periodic=False),
        SPECTRUM,
        HOP,
        WINDOW,
        2.0,
        False,
        center=False,
    )
    banks, _ = get_mel_banks(BANDS, SPECTRUM, RATE, 60.0, 7600.0, 100.0, -500.0, 1.0)
    energy = power[:-1].T @ banks.T
    level = energy.clamp(min=float(energy.max()) * 1e-6 + 1e-12).log()
    due = ((level - level.mean()) / 3.0).numpy()
    assert found.shape == due.shape
    np.testing.assert_allclose(found, due, atol=1e-3)


def test_a_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    encoder = network().export("x")
    encoder.save(tmp_path / "voices")
    read = SpeakerEncoder.load(str(tmp_path / "voices"))
    assert (read.shape, read.name) == (SMALL, "voices")
    assert np.allclose(
        read.encode([features(sound(1.0))]), encoder.encode([features(sound(1.0))]), atol=0.02
    )


def test_what_is_wrong_with_a_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        SpeakerEncoder.load(str(tmp_path))
    network().export("x").save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for change, named in (
        ({"model_type": "whisper"}, "model_type"),
        ({"width": 9}, "weights"),
        ({"x": 1}, "x"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(ConfigError, match=named):
            SpeakerEncoder.load(str(tmp_path))


# ------------------------------------------------------------------------------------------------------------ stretches
@settings(max_examples=80)
@given(
    st.lists(st.tuples(st.floats(0, 8), st.floats(0.001, 6)), min_size=1, max_size=12),
    st.integers(500, 200_000),
    st.floats(0.1, 5),
)
def test_stretches_are_those_of_the_whole(
    raw: list[tuple[float, float]], block: int, longest: float
) -> None:
    spans = sorted((start, start + length) for start, length in raw)
    whole = np.arange(9 * RATE, dtype=np.float32)
    blocks = [whole[at : at + block] for at in range(0, len(whole), block)]
    for (start, end), found in zip(spans, stretches(blocks, spans, longest), strict=True):
        begin = int(start * RATE)
        assert np.array_equal(
            found, whole[begin : max(begin + 1, int(min(end, start + longest) * RATE))]
        )


def test_wrong_spans_are_named() -> None:
    for spans in (
        [(1.0, 1.0)],
        [(2.0, 1.0)],
        [(-1.0, 1.0)],
        [(3.0, 4.0), (1.0, 2.0)],
        [(0.0, float("nan"))],
    ):
        with refuses(BadRequest, "spans"):
            check(spans)
    with refuses(BadRequest, "spans"):
        list(stretches([sound(1.0)], [(0.0, 0.5), (1.0, 2.0)], 9.0))


# -------------------------------------------------------------------------------------------------------------- service
class World:
    def __init__(
        self, hub: MemoryHub, stack: AsyncExitStack, folder: Path, bus: Bus, store: BlobStore
    ):
        self.bus, self._hub, self._stack, self._folder, self._store = bus, hub, stack, folder, store

    async def start(self, **options: Any) -> Speakers:
        config = SpeakersConfig(model=str(self._folder), name="ears", metrics_port=-1, **options)
        actor = Speakers(config, await memory_bus(self._hub, "speakers"))
        await self._stack.enter_async_context(running(actor))
        await settle()
        return actor

    async def compare(
        self, data: bytes, spans: list[tuple[float, float]], model: str = ""
    ) -> np.ndarray[Any, Any]:
        request = EmbedSpeakers(audio=NO_AUDIO, spans=spans, model=model)
        found = await voices(self.bus, self._store, data, request, deadline=30.0)
        assert found.alike == pytest.approx(SMALL.alike)
        assert all(isinstance(vector, array) for vector in found.vectors)
        return np.array(found.vectors)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    network().export("x").save(tmp_path)
    async with AsyncExitStack() as stack:
        hub = MemoryHub()
        bus = await memory_bus(hub, "gateway")
        stack.push_async_callback(bus.close)
        store = await stack.enter_async_context(BlobStore(bus.instance, 16 << 20))
        yield World(hub, stack, tmp_path, bus, store)
        store.check_integrity()
        assert store.stats()["blobs"] == 0


def wav(seconds: float) -> bytes:
    pcm = (sound(seconds) * 32767).astype("<i2").tobytes()
    return wav_header(RATE, len(pcm)) + pcm


SPANS = [(0.1 * n, 0.1 * n + (1.6 if n % 3 else 0.7)) for n in range(70)]


async def test_stretches_of_a_file_become_vectors_in_order(world: World) -> None:
    actor = await world.start(max_batch=8)
    data = wav(9.0)
    found = await world.compare(data, SPANS)
    assert found.shape == (len(SPANS), SMALL.size)
    alone = [await world.compare(data, [span]) for span in SPANS[:3]]
    assert np.allclose(found[:3], np.concatenate(alone), atol=1e-5)
    whole = await world.compare(wav(2.0), [])
    assert whole.shape == (1, SMALL.size)
    assert actor.stats()["batches"] == 9 + 3 + 1
    actor.check_integrity()


async def test_wrong_requests_are_refused_by_name(world: World) -> None:
    with pytest.raises(Unavailable, match="--speakers"):
        await world.compare(wav(1.0), SPANS)
    await world.start(max_audio=5.0)
    with refuses(BadRequest, "spans"):
        await world.compare(wav(1.0), [(2.0, 1.0)])
    with refuses(BadRequest, "spans"):
        await world.compare(wav(1.0), [(2.0, 3.0)])
    with refuses(BadRequest, "file"):
        await world.compare(wav(9.0), SPANS)
    with refuses(UnknownModel, "model"):
        await world.compare(wav(1.0), SPANS[:1], model="nose")


async def test_another_instance_goes_on_where_one_died(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of a hundred batches: the victim dies in the middle, no vector is lost or doubled."""
    victim, data = await world.start(max_batch=1), wav(9.0)
    due = await world.compare(data, SPANS)
    other = await world.start(max_batch=1)
    before = {actor: actor.stats()["spans"] for actor in (victim, other)}
    victims: list[Speakers] = []
    encoded = Speakers._encoded

    async def dying(self: Speakers, *args: Any) -> AsyncIterator[Any]:
        async for vectors in encoded(self, *args):
            yield vectors
            if not victims and self.stats()["spans"] - before[self] >= 20:
                victims.append(self)
                die(self.bus)

    monkeypatch.setattr(Speakers, "_encoded", dying)
    found = await world.compare(data, SPANS)
    assert np.array_equal(found, due)
    [dead] = victims
    alive = other if dead is victim else victim
    assert 0 < alive.stats()["spans"] - before[alive] < len(SPANS)


# --------------------------------------------------------------------------------------------------- recipe and weights
def test_the_recipe_learns_and_refuses_held_out_seeds() -> None:
    recipe = pocket_speakers.Recipe(
        people=6, sentences=3, batch=6, steps=60, warmup=10, shape=SMALL
    )
    heard = speaker_data.training_features(recipe.seed, recipe.people, recipe.sentences)
    again = speaker_data.training_features(recipe.seed, 1, 1)
    assert np.array_equal(again[0][0], heard[0][0])
    encoder = pocket_speakers.train(recipe, heard, log=False).export("x")
    vectors = [
        encoder.encode([one.astype(np.float32) for one in own]).mean(axis=0) for own in heard
    ]
    right = [
        int(np.argmax([encoder.encode([one.astype(np.float32)])[0] @ vector for vector in vectors]))
        for own in heard
        for one in own
    ]
    assert np.mean(np.array(right) == np.repeat(range(6), 3)) > 0.6
    with pytest.raises(RecipeError) as refused:
        speaker_data.training_features(HELD_OUT_SEEDS[0], 1, 1)
    assert refused.value.param == "seed"


def test_people_of_training_and_held_out_people_share_no_variant() -> None:
    rng = Random(1)
    trained = {speaker_data.person(rng).voice.name.partition("+")[2] for _ in range(400)}
    held_out = {one.voice.name.partition("+")[2] for one in speaker_data.held_out_people(rng, 40)}
    assert len(held_out) == 10
    assert not trained & held_out


def test_error_rates_are_what_they_say() -> None:
    truth = [speaker_data.Turn(0, 0.0, 10.0), speaker_data.Turn(1, 10.0, 20.0)]
    turn = speaker_evaluate.diarize.Turn
    assert speaker_evaluate.error_rate(truth, [turn(5, 0.0, 10.0), turn(2, 10.0, 20.0)]) == 0
    assert speaker_evaluate.error_rate(truth, [turn(5, 0.0, 20.0)]) == pytest.approx(0.5, abs=0.01)
    assert speaker_evaluate.error_rate(truth, [turn(5, 0.0, 10.0)]) == pytest.approx(0.5, abs=0.01)
    assert speaker_evaluate.error_rate(truth, []) == 1
    same, other = np.array([0.9, 0.8, 0.2], np.float32), np.array([0.1, 0.3, 0.0], np.float32)
    assert speaker_evaluate.equal_error(speaker_evaluate.Pairs(same, other))[0] == pytest.approx(
        1 / 3
    )


@pytest.mark.long
@pytest.mark.slow
def test_the_committed_weights_tell_held_out_people_apart() -> None:
    encoder = SpeakerEncoder.load(str(FOLDER))
    assert sum(array.size for array in encoder.weights.values()) <= 1_000_000
    waves = speaker_evaluate.held_out_waves(20, 5)
    rate, _ = speaker_evaluate.equal_error(speaker_evaluate.pairs(encoder, waves, 10, 3.0))
    assert rate < 0.12
    silero = speaker_evaluate.Silero()
    for speakers, bound in ((2, 0.15), (3, 0.15)):
        made = speaker_evaluate.held_out_dialogues(speakers, 8, speaker_data.DETECTED)
        heard = [speaker_evaluate.prepare(encoder, one, silero) for one in made]
        error, _ = speaker_evaluate.diarization(heard, encoder.shape.alike)
        assert error < bound, speakers
