"""Test the pool of pocket-asr: clean speech, conditions of a batch, labels, a run by the clock."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("espeakng_loader")

from transformers import WhisperForConditionalGeneration, WhisperTokenizer  # noqa: E402

from recipes.asr import data as asr_data  # noqa: E402
from recipes.asr import speech as asr_speech  # noqa: E402
from recipes.asr import tokenizer as names  # noqa: E402
from recipes.asr.batches import IGNORED  # noqa: E402
from recipes.asr.conditions import record  # noqa: E402
from recipes.asr.pool import Pool, PoolStream  # noqa: E402
from recipes.asr.recipe import PoolRecipe, Recipe  # noqa: E402
from recipes.asr.speech import SpeechShard, pack, training_speech  # noqa: E402
from recipes.asr.train import PoolTrainer, build_tokenizer  # noqa: E402
from recipes.speech.noise import CLEAN, RATE  # noqa: E402
from recipes.training.errors import RecipeError  # noqa: E402
from recipes.training.held_out_seeds import HELD_OUT_SEEDS  # noqa: E402
from recipes.training.loop import Schedule  # noqa: E402

SMALL = PoolRecipe(
    width=64,
    heads=1,
    feed_forward=128,
    encoder_layers=2,
    decoder_layers=2,
    shard=8,
    batch=4,
    warmup=2,
    full_window_share=0.0,
    pool_samples=2_000_000,
    pool_clips=32,
    first_clips=8,
    chunk=2,
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer() -> WhisperTokenizer:
    return build_tokenizer(Recipe(vocabulary=320, tokenizer_sentences=300))


@pytest.fixture(scope="module")
def clips() -> list[asr_data.Clip]:
    return [training_speech(SMALL, index) for index in range(8)]


@pytest.fixture(scope="module")
def shard(clips: list[asr_data.Clip], tokenizer: WhisperTokenizer) -> SpeechShard:
    return pack(clips, tokenizer)


def stream(recipe: PoolRecipe, tokenizer: WhisperTokenizer, folder: Path) -> PoolStream:
    return PoolStream(recipe, tokenizer, folder, CPU)


def numbered(lengths: list[int], value: int) -> SpeechShard:
    """Return a shard whose samples and tokens are all `value`."""
    count = len(lengths)
    return SpeechShard(
        samples=np.full(sum(lengths), value, np.int16),
        lengths=np.array(lengths, np.int64),
        tokens=np.full((count, 128), value, np.int16),
        spans=np.zeros((count, 128, 2), np.int16),
        phonemes=np.zeros((count, 1200), np.uint8),
    )


# Speech


def test_speech_is_a_function_of_seed_and_index(clips: list[asr_data.Clip]) -> None:
    again = training_speech(SMALL, 3)
    np.testing.assert_array_equal(clips[3].wave, again.wave)
    assert clips[3].text == again.text
    assert len({clip.text for clip in clips}) > 5


def test_speech_refuses_held_out_seeds() -> None:
    with pytest.raises(RecipeError) as refused:
        training_speech(replace(SMALL, seed=HELD_OUT_SEEDS.start), 0)
    assert refused.value.param == "seed"


def test_words_of_a_scaled_throat_lie_within_its_speech() -> None:
    recipe = replace(SMALL, throats=(1.15, 1.16), throat_share=1.0, no_speech_share=0.0)
    clip = training_speech(recipe, 1)
    seconds = len(clip.wave) / RATE
    assert all(0 <= start < end <= seconds + 0.01 for _, start, end in clip.words)
    assert clip.words[-1][2] > 0.5 * seconds


def test_a_shard_survives_its_file(shard: SpeechShard, tmp_path: Path) -> None:
    asr_speech.write(tmp_path / "0.npz", shard)
    again = asr_speech.read(tmp_path / "0.npz")
    for name, part in vars(shard).items():
        np.testing.assert_array_equal(part, getattr(again, name))
    assert shard.lengths.sum() == len(shard.samples)


# The pool


def test_the_oldest_shards_leave_a_full_pool() -> None:
    pool = Pool(replace(SMALL, pool_samples=100, pool_clips=10), CPU)
    rng = np.random.default_rng(0)
    for value in range(1, 8):
        pool.add(numbered([10, 20], value))
        kept = {value - 2, value - 1, value} & set(range(1, 8))
        rows = pool.draw(rng, 60)
        found = {int(token) for token in pool.tokens[rows, 0]}
        assert found == kept
        for row in rows:
            start, length = pool.starts[row], pool.lengths[row]
            samples = pool.samples[start : start + length]
            assert (samples == pool.tokens[row, 0]).all()


def test_a_batch_without_conditions_is_what_inference_hears(
    shard: SpeechShard, clips: list[asr_data.Clip], tokenizer: WhisperTokenizer, tmp_path: Path
) -> None:
    clean = replace(CLEAN, before=(0.0, 0.0), after=(0.0, 0.0), peak=(0.0, 0.0))
    made = stream(replace(SMALL, conditions=clean), tokenizer, tmp_path)
    made.pool.add(shard)
    made.mask = lambda features, frames: features  # type: ignore[method-assign]
    row = next(i for i, clip in enumerate(clips) if clip.text)
    batch = made.batch(np.array([row]))
    loudest = clips[row].wave / np.abs(clips[row].wave).max()
    want = names.feature_extractor()(loudest, sampling_rate=RATE, return_tensors="pt")
    frames = batch.features.shape[2]
    torch.testing.assert_close(
        batch.features[0], want["input_features"][0][:, :frames], atol=0.06, rtol=0
    )


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_labels_are_those_of_the_text(
    shard: SpeechShard,
    clips: list[asr_data.Clip],
    tokenizer: WhisperTokenizer,
    tmp_path: Path,
    share: float,
) -> None:
    made = stream(replace(SMALL, timestamp_share=share), tokenizer, tmp_path)
    made.pool.add(shard)
    batch, ids = made.batch(np.arange(8)), made.id
    for row, clip in enumerate(clips):
        text, _ = asr_data.token_spans(clip, tokenizer)
        count, labels, said = len(text), batch.labels[row].tolist(), batch.tokens[row].tolist()
        if not text:
            assert labels[:4] == [ids[names.NO_SPEECH], IGNORED, IGNORED, ids[names.END]]
            continue
        head = [ids[names.START], ids[names.ENGLISH], ids[names.TRANSCRIBE]]
        assert said[:3] == head
        assert said[4 : 4 + count] == labels[3 : 3 + count] == list(text)
        assert labels[0] == ids[names.ENGLISH]
        rest = labels[3 + count :]
        assert batch.word_frames[row, 3 : 3 + count].any(-1).all()
        assert not batch.word_frames[row, 3 + count :].any()
        if share:
            assert said[3] == labels[2] >= made.first_timestamp
            assert said[4 + count] == rest[0] > labels[2]
            rest = rest[1:]
        else:
            assert said[3] == ids[names.NO_TIMESTAMPS]
            assert labels[2] == IGNORED
        assert rest[0] == ids[names.END]
        assert set(rest[1:]) <= {IGNORED}
    assert batch.phonemes.shape == (8, batch.features.shape[2] // 2)


def test_conditions_are_finite_and_end_with_the_clip() -> None:
    generator = torch.Generator().manual_seed(5)
    waves = torch.randn(6, 16_000, generator=generator)
    waves[5] = 0
    lengths = torch.full((6, 1), 12_000)
    waves[:, 12_000:] = 0
    every = replace(PoolRecipe().conditions, room=1.0, noise=1.0, telephone=1.0, clipping=1.0)
    heard = record(waves, lengths, lengths, generator, every)
    assert heard.isfinite().all()
    assert heard.abs().max() <= 1
    assert not heard[:, 12_000:].any()
    assert (heard[:5, :12_000].square().mean(1) > 0).all()


# A run


def test_a_run_by_the_clock_exports_what_it_has(
    tokenizer: WhisperTokenizer, tmp_path: Path
) -> None:
    trainer = PoolTrainer(
        SMALL, Schedule(steps=9, warmup=2), data=tmp_path / "data", tokenizer=tokenizer
    )
    trainer.out = tmp_path / "out"
    (tmp_path / "stop").touch()  # after one step
    with trainer.makers(1):
        reports = trainer.run(tmp_path / "state.pt", seconds=600)
    assert len(reports) == 1
    assert reports[0].text.isfinite()
    model = WhisperForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert model.config.d_model == SMALL.width
    assert WhisperTokenizer.from_pretrained(tmp_path / "out").get_vocab() == tokenizer.get_vocab()


def test_a_run_whose_time_is_over_takes_no_step(
    tokenizer: WhisperTokenizer, tmp_path: Path
) -> None:
    trainer = PoolTrainer(SMALL, Schedule(steps=9), data=tmp_path / "data", tokenizer=tokenizer)
    with trainer.makers(1):
        assert trainer.run(tmp_path / "state.pt", seconds=1e-6) == []
