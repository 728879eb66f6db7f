"""Test the pocket-asr recipe at a small size: examples, shards, training, the exported folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("espeakng_loader")

from recipes.asr import data as asr_data  # noqa: E402
from recipes.asr import evaluate as asr_evaluate  # noqa: E402
from recipes.asr import tokenizer as names  # noqa: E402
from recipes.asr.batches import IGNORED, dequantize  # noqa: E402
from recipes.asr.model import build  # noqa: E402
from recipes.asr.recipe import Recipe  # noqa: E402
from recipes.asr.shards import is_suspended, read, shard_of_visit, write  # noqa: E402
from recipes.asr.train import ShardTrainer  # noqa: E402
from recipes.speech.noise import RATE  # noqa: E402
from recipes.speech.sentences import CATEGORIES, is_held_out  # noqa: E402
from recipes.speech.voices import HELD_OUT_VARIANTS  # noqa: E402
from recipes.training.errors import RecipeError  # noqa: E402
from recipes.training.held_out_seeds import HELD_OUT_SEEDS  # noqa: E402
from recipes.training.loop import Schedule  # noqa: E402

TINY = Recipe(
    width=64,
    heads=1,
    feed_forward=128,
    encoder_layers=2,
    decoder_layers=2,
    vocabulary=320,
    tokenizer_sentences=300,
    shard=8,
    group=2,
    passes=2,
    batch=4,
    warmup=2,
    full_window_share=0.0,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("asr")
    trainer = ShardTrainer(TINY, Schedule(steps=4, warmup=2), data=folder / "data")
    return trainer, trainer.run(folder / "state.pt")


@pytest.fixture(scope="module")
def folder(trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pocket-asr")
    trained[0].export(out)
    return out


# Examples


def test_a_clip_is_a_function_of_seed_and_index() -> None:
    once, again, other = (asr_data.training_clip(TINY, index) for index in (7, 7, 8))
    np.testing.assert_array_equal(once.wave, again.wave)
    assert once.text == again.text
    assert once.text != other.text


def test_training_refuses_held_out_seeds() -> None:
    with pytest.raises(RecipeError) as refused:
        asr_data.training_clip(replace(TINY, seed=HELD_OUT_SEEDS.start + 5), 0)
    assert refused.value.param == "seed"


@pytest.mark.parametrize("category", CATEGORIES)
def test_held_out_clips_have_sentences_and_voices_of_their_own(category: str) -> None:
    made = asr_data.held_out_clip(category, 3)
    assert is_held_out(made.text)
    assert made.voice.name.partition("+")[2] in HELD_OUT_VARIANTS
    assert made.category == category


@pytest.mark.parametrize("throats", [(1.0, 1.0), (0.86, 0.87), (1.15, 1.16)])
def test_words_have_times_within_the_clip(throats: tuple[float, float]) -> None:
    recipe = replace(TINY, throat_share=1.0, throats=throats)
    made = next(
        clip
        for clip in map(lambda i: asr_data.training_clip(recipe, i), range(50))
        if clip.text.count(" ") > 4
    )
    starts = [start for _, start, _ in made.words]
    assert len(made.words) == len(made.text.split())
    assert starts == sorted(starts)
    assert all(0 <= start < end <= len(made.wave) / RATE for _, start, end in made.words)


def test_features_survive_quantization(trained) -> None:
    trainer, _ = trained
    made = asr_data.training_clip(TINY, 1)
    one = asr_data.example(made, trainer.tokenizer)
    want = asr_data.features(made.wave)
    np.testing.assert_allclose(dequantize(one, one.frames), want, atol=0.005)
    padded = names.feature_extractor()(made.wave, sampling_rate=RATE, return_tensors="np")[
        "input_features"
    ][0]
    np.testing.assert_allclose(
        dequantize(one, padded.shape[1])[:, : one.frames - 4],
        padded[:, : one.frames - 4],
        atol=0.01,
    )
    np.testing.assert_allclose(
        dequantize(one, padded.shape[1])[:, one.frames + 4 :],
        padded[:, one.frames + 4 :],
        atol=0.01,
    )
    assert set(one.phonemes.tolist()) - {0}


def test_shards_round_trip(trained, tmp_path: Path) -> None:
    trainer, _ = trained
    examples = [
        asr_data.example(asr_data.training_clip(TINY, index), trainer.tokenizer)
        for index in range(5)
    ]
    write(tmp_path / "0.npz", examples)
    for one, again in zip(examples, read(tmp_path / "0.npz"), strict=True):
        np.testing.assert_array_equal(one.features, again.features)
        np.testing.assert_array_equal(one.phonemes, again.phonemes)
        np.testing.assert_allclose(one.spans, again.spans)
        assert one.tokens == again.tokens


def test_every_shard_is_visited_once_per_pass() -> None:
    recipe = replace(TINY, group=4, passes=3)
    visits = [shard_of_visit(recipe, visit) for visit in range(2 * 4 * 3)]
    assert [shard for shard, _ in visits[:4]] == [0, 1, 2, 3]
    assert sorted(visits) == [(shard, again) for shard in range(8) for again in range(3)]
    assert {shard for shard, _ in visits[:12]} == {0, 1, 2, 3}


def test_this_process_is_not_suspended() -> None:
    assert not is_suspended(1)


# Batches


def test_decoder_inputs_and_labels(trained) -> None:
    trainer, _ = trained
    stream, ids = trainer.stream, trainer.stream.id
    one = asr_data.example(
        next(c for c in map(lambda i: asr_data.training_clip(TINY, i), range(9)) if c.text),
        trainer.tokenizer,
    )
    head = [ids[names.START], ids[names.ENGLISH], ids[names.TRANSCRIBE]]
    said, wanted, spans = stream.decoder_row(one, timed=False)
    assert said == [*head, ids[names.NO_TIMESTAMPS], *one.tokens]
    assert wanted == [ids[names.ENGLISH], IGNORED, IGNORED, *one.tokens, ids[names.END]]
    assert [wanted[place] for place, _ in spans] == list(one.tokens)
    said, wanted, _ = stream.decoder_row(one, timed=True)
    assert said[3] > ids[names.NO_TIMESTAMPS]
    assert said[-1] > said[3]
    assert wanted == [ids[names.ENGLISH], IGNORED, said[3], *said[4:], ids[names.END]]


def test_batches_are_a_function_of_the_step(trained) -> None:
    trainer, _ = trained
    once, again = trainer.stream.batch(3), trainer.stream.batch(3)
    assert torch.equal(once.features, again.features)
    assert torch.equal(once.tokens, again.tokens)
    assert once.word_frames.any(-1).sum() > 0


# The recipe in small


def test_two_runs_agree_even_across_a_restart(trained, tmp_path: Path) -> None:
    _, reports = trained
    first = ShardTrainer(TINY, Schedule(steps=2, warmup=2, decay=0.01), data=tmp_path / "data")
    first.run(tmp_path / "state.pt")
    resumed = ShardTrainer(TINY, Schedule(steps=4, warmup=2), data=tmp_path / "data")
    resumed.load_state(tmp_path / "state.pt")
    again = resumed.run(tmp_path / "state.pt")
    assert [float(report.text) for report in again] == pytest.approx(
        [float(report.text) for report in reports[2:]], rel=2e-2
    )


def test_a_file_stop_ends_a_run_after_a_step(tmp_path: Path) -> None:
    trainer = ShardTrainer(TINY, Schedule(steps=9, warmup=2), data=tmp_path / "data")
    (tmp_path / "stop").touch()
    assert len(trainer.run(tmp_path / "state.pt")) == 1
    assert (tmp_path / "state.pt").exists()


def test_a_run_begins_with_an_exported_folder(trained, folder: Path, tmp_path: Path) -> None:
    trainer = ShardTrainer(TINY, Schedule(steps=9, warmup=2), data=tmp_path / "data")
    trainer.load_weights(folder)
    begun, wanted = (one.model.whisper.state_dict() for one in (trainer, trained[0]))
    for name, weight in wanted.items():
        torch.testing.assert_close(
            begun[name], weight, rtol=1e-3, atol=1e-4
        )  # it is written in half precision
    assert trainer.step == 0


def test_the_folder_loads_and_transcribes(folder: Path) -> None:
    model, processor = asr_evaluate.load(folder)
    wave = asr_data.held_out_clip("question", 0).wave
    (heard,) = asr_evaluate.transcribe(model, processor, [wave])
    assert "<|" not in heard
    inputs = processor(wave, sampling_rate=RATE, return_tensors="pt")["input_features"]
    assert inputs.shape == (1, 80, 1200)
    timed = model.generate(
        inputs, return_timestamps=True, return_token_timestamps=True, max_new_tokens=8
    )
    assert timed["token_timestamps"].shape == timed["sequences"].shape
    assert json.loads((folder / "config.json").read_text())["architectures"] == [
        "WhisperForConditionalGeneration"
    ]


def test_special_tokens_stand_in_whispers_order(folder: Path) -> None:
    _, processor = asr_evaluate.load(folder)
    tokenizer = processor.tokenizer
    prefix = tokenizer.convert_ids_to_tokens(tokenizer("Hello.").input_ids)[:4]
    assert prefix == [names.START, names.ENGLISH, names.TRANSCRIBE, names.NO_TIMESTAMPS]
    last = tokenizer.convert_tokens_to_ids(names.NO_TIMESTAMPS)
    assert tokenizer.convert_tokens_to_ids(names.NO_SPEECH) == last - 1
    assert tokenizer.convert_tokens_to_ids("<|0.00|>") == last + 1
    assert tokenizer.convert_tokens_to_ids("<|12.00|>") == len(tokenizer) - 1
    text = " A small red circle, naïve and 東京."
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_the_real_recipe_fits_its_bounds(trained) -> None:
    recipe, small = Recipe(), trained[0].tokenizer
    entries = recipe.vocabulary + len(names.SPECIALS) + len(names.TIMESTAMPS)
    parameters = sum(parameter.numel() for parameter in build(recipe, small).parameters())
    assert entries <= 2000
    assert parameters + (entries - len(small)) * recipe.width <= 8_000_000
    assert recipe.positions == 600


# Scores


@pytest.mark.parametrize(
    ("said", "heard", "errors"),
    [
        ("a b c", "a b c", 0),
        ("a b c", "a c", 1),
        ("a b", "a x b y", 2),
        ("", "a", 1),
        ("a b c", "", 3),
    ],
)
def test_distance_counts_word_errors(said: str, heard: str, errors: int) -> None:
    assert asr_evaluate.edit_distance(said.split(), heard.split()) == errors


def test_an_utterance_of_the_recipe_fits_the_window() -> None:
    rng = Random(0)
    lengths = [len(asr_data.training_clip(TINY, rng.randrange(10_000)).wave) for _ in range(12)]
    assert max(lengths) <= names.WINDOW * RATE
