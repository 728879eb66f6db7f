"""Test the pocket-tts recipe at a small size: data, losses, stages, the exported folder."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("espeakng_loader")

from motet_tts.pocket.config import PocketConfig  # noqa: E402
from motet_tts.pocket.errors import PocketError  # noqa: E402
from motet_tts.pocket.frame_generator import Pointer  # noqa: E402
from motet_tts.pocket.model import PocketSpeech  # noqa: E402
from motet_tts.pocket.phonemizer import PhonemeSequence  # noqa: E402
from recipes.asr.evaluate import edit_distance  # noqa: E402
from recipes.speech.sentences import is_held_out  # noqa: E402
from recipes.training.errors import RecipeError  # noqa: E402
from recipes.training.held_out_seeds import HELD_OUT_SEEDS  # noqa: E402
from recipes.tts import batches as tts_batches  # noqa: E402
from recipes.tts import data as tts_data  # noqa: E402
from recipes.tts import losses as tts_losses  # noqa: E402
from recipes.tts import shards as tts_shards  # noqa: E402
from recipes.tts.codebooks import fit  # noqa: E402
from recipes.tts.recipe import Recipe, Stage  # noqa: E402
from recipes.tts.train import STAGES, Trainer, build_config, build_model  # noqa: E402

SHORT = Stage(steps=2, batch=3, matrix_lr=0.01, other_lr=1e-3, warmup=1)
TINY = Recipe(
    shard=12,
    shards=2,
    codec_shards=1,
    codebook_sentences=6,
    segment=8,
    reader=SHORT,
    codec=SHORT,
    speaker=SHORT,
)
SIZES = {
    **{"codebooks": 2, "codes": 16, "latent": 8, "codec_width": 32, "codec_layers": 1},
    **{
        "reader_width": 64,
        "reader_layers": 1,
        "hidden": 64,
        "layers": 1,
        "heads": 2,
        "kv_heads": 1,
    },
    **{"feed_forward": 64, "depth": 32},
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> tts_shards.Shards:
    made = tts_shards.Shards(TINY, tmp_path_factory.mktemp("data"))
    made.fill()
    return made


@pytest.fixture(scope="module")
def config(shards: tts_shards.Shards) -> PocketConfig:
    return build_config(TINY, shards, **SIZES)


@pytest.fixture(scope="module")
def trained(config, shards, tmp_path_factory: pytest.TempPathFactory):
    model = build_model(TINY, config)
    folder = tmp_path_factory.mktemp("tts")
    return (
        model,
        {
            stage: Trainer(TINY, model, stage, shards).run(folder / f"{stage}.pt")
            for stage in STAGES
        },
        folder,
    )


@pytest.fixture(scope="module")
def example(shards):
    return next(iter(shards))[0]


# Examples


def test_a_recording_is_a_function_of_seed_and_index() -> None:
    once, again = (tts_data.training_recording(TINY, 5) for _ in range(2))
    assert once.text == again.text
    np.testing.assert_array_equal(once.speech.samples, again.speech.samples)


def test_training_refuses_held_out_seeds_and_sentences() -> None:
    with pytest.raises(RecipeError) as refused:
        tts_data.training_recording(replace(TINY, seed=HELD_OUT_SEEDS.start), 0)
    assert refused.value.param == "seed"
    assert not any(
        is_held_out(tts_data.training_recording(TINY, index).text) for index in range(20)
    )
    assert is_held_out(tts_data.held_out_text("question", 3))


def test_phonemes_belong_to_their_words(example) -> None:
    begins = {phoneme.character for phoneme in example.phonemes}
    assert all(begin == 0 or example.text[begin - 1] in " -" for begin in begins)
    assert [phoneme.character for phoneme in example.phonemes] == sorted(
        phoneme.character for phoneme in example.phonemes
    )
    assert [phoneme.second for phoneme in example.phonemes] == sorted(
        phoneme.second for phoneme in example.phonemes
    )


def test_pointers_reach_the_end_within_the_step_limit(config, example) -> None:
    frames = len(example.features) // config.stride
    places = tts_data.pointers(config, [phoneme.second for phoneme in example.phonemes], frames)
    steps = [after - before for before, after in pairwise(places)]
    assert len(places) == frames + 1
    assert places[0] == 0
    assert places[-1] == len(example.phonemes)
    assert min(steps) >= 0
    assert max(steps) < config.advances
    assert len(example.samples) == config.frame_samples * frames


def test_files_round_trip(config, shards) -> None:
    first, second = shards
    made = tts_data.example(PocketConfig(), tts_data.training_recording(TINY, 0))
    assert (first[0].text, first[0].voice, first[0].rate, first[0].phonemes) == (
        *(made.text, made.voice, made.rate),
        made.phonemes,
    )
    torch.testing.assert_close(first[0].features, made.features, atol=2e-3, rtol=2e-3)
    assert made.samples is not None
    torch.testing.assert_close(first[0].samples, made.samples.clamp(-1, 1), atol=1e-4, rtol=0)
    assert [one.samples is None for one in second] == [True] * TINY.shard
    assert len(list(shards.with_samples())) == TINY.codec_shards


def test_processes_make_the_same_files(shards, tmp_path: Path) -> None:
    """Compare files of worker processes; espeak-ng's breath noise depends on the process."""
    others = tts_shards.Shards(replace(TINY, shards=1), tmp_path, makers=1)
    others.fill()
    (here,), there = others, next(iter(shards))
    assert [(one.text, one.voice, one.phonemes) for one in here] == [
        (one.text, one.voice, one.phonemes) for one in there
    ]
    for one, other in zip(here, there, strict=True):
        assert float((one.features - other.features).abs().mean()) < 0.1


def test_every_epoch_has_every_sentence_among_similar_lengths() -> None:
    lengths = [(7 * number) % 101 for number in range(200)]
    order = tts_batches.BatchOrder(lengths, 10, seed=1)
    first = [order.batch(step) for step in range(20)]
    assert sorted(number for batch in first for number in batch) == list(range(200))
    assert [order.batch(step) for step in range(20, 40)] != first
    assert tts_batches.BatchOrder(lengths, 10, seed=1).batch(3) == first[3]
    assert max(lengths[batch[0]] - lengths[batch[-1]] for batch in first) <= 10


# Synthesizer and codec


def test_samples_do_not_depend_on_how_frames_are_cut(trained) -> None:
    model, _, _ = trained
    codec = model.codec.eval()
    codes = torch.randint(16, (2, 9, 2), generator=torch.Generator().manual_seed(1))
    whole = codec.decode([codec.begin(3), codec.begin(4)], codes)
    alone = codec.begin(4)
    pieces = torch.cat(
        [codec.decode([alone], codes[1:, start:stop]) for start, stop in ((0, 1), (1, 4), (4, 9))],
        1,
    )
    assert whole.shape == (2, 9 * model.config.frame_samples)
    # Roundings of the pitch add up in the phase: to 1.5 % in one run on two cores.
    assert float((whole[1:] - pieces).square().mean().sqrt()) < 5e-2 * float(
        whole.square().mean().sqrt()
    )


def test_codes_decode_to_the_quantized_latents(trained) -> None:
    quantizer = trained[0].codec.quantizer
    codes, said = quantizer(torch.randn(2, 5, 8))
    assert torch.allclose(quantizer.decode(codes), said, atol=1e-5)


def test_codes_explain_most_of_the_variance(config, shards) -> None:
    codec = build_model(TINY, config).codec
    features = [one.features for one in next(iter(shards))]
    assert fit(codec, features, torch.Generator().manual_seed(0)) < 0.4
    encoder, heard = codec.encoder, features[0][None]
    said = codec.quantizer(encoder(heard))[1] @ encoder.axes.mT + encoder.mean
    stacked = encoder.stack(heard)
    assert float((said - stacked).square().mean()) < 0.5 * float(
        (stacked - encoder.mean).square().mean()
    )
    nothing = replace(config, codebooks=1)
    coarse = type(codec)(nothing)
    fit(coarse, features, torch.Generator().manual_seed(0))
    rough = (
        coarse.quantizer(coarse.encoder(heard))[1] @ coarse.encoder.axes.mT + coarse.encoder.mean
    )
    assert float((rough - stacked).square().mean()) > float((said - stacked).square().mean())


# Speaker


def test_training_inputs_match_generation(trained, config, example) -> None:
    model = trained[0]
    one = tts_batches.generator_example(config, model.codec, example)
    pointer = Pointer(one.phonemes.tolist())
    assert one.inputs[0].tolist() == model.speaker.first(one.phonemes.tolist()).tolist()
    for row, codes, step in zip(one.inputs[1:], one.codes, one.steps.tolist(), strict=False):
        pointer.move(step)
        assert row.tolist() == [*codes.tolist(), *pointer.columns(model.speaker.end)]
    pointer.move(int(one.steps[-1]))
    assert pointer.done


def test_a_batch_gives_the_losses_of_its_sentences(
    trained, config, example, shards, monkeypatch
) -> None:
    monkeypatch.setattr(tts_losses, "MAX_CORRUPTED", 0.0)
    model = trained[0].eval()
    examples = [
        tts_batches.generator_example(config, model.codec, one) for one in next(iter(shards))[:3]
    ]
    together = tts_losses.generator_loss(model.speaker, examples, torch.Generator())
    frames = torch.tensor([float(len(one.codes)) for one in examples])
    for name, loss in together.items():
        alone = torch.stack(
            [
                tts_losses.generator_loss(model.speaker, [one], torch.Generator())[name]
                for one in examples
            ]
        )
        torch.testing.assert_close(
            loss, (alone * frames).sum() / frames.sum(), atol=1e-4, rtol=1e-4
        )


def test_phonemes_are_split_by_word(trained, config, shards) -> None:
    examples = [tts_batches.phonemizer_example(config, one) for one in next(iter(shards))]
    for one in examples:
        assert one.begins[0] == 0
        assert list(one.begins) == sorted(set(one.begins))
        assert len(one.words) == len(one.begins)
    assert float(tts_losses.phonemizer_loss(trained[0].reader, examples)["loss"].detach()) > 0


def test_the_phonemizer_learns_a_few_sentences(config, shards) -> None:
    """Overfit a few sentences, so that the loss is known to train what `read` decodes."""
    model = build_model(TINY, config)
    examples = [tts_batches.phonemizer_example(config, one) for one in next(iter(shards))[:4]]
    optimizer = torch.optim.AdamW(model.reader.parameters(), 3e-3)
    for _ in range(250):
        loss = tts_losses.phonemizer_loss(model.reader, examples)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for one in examples:
        wanted = [phoneme for word in one.words for phoneme in word]
        assert edit_distance(model.reader.read(one.text, one.voice).phonemes, wanted) <= 2


# The recipe in small


def test_every_stage_runs_and_its_losses_are_finite(trained) -> None:
    _, reports, folder = trained
    for stage in STAGES:
        assert len(reports[stage]) == 2
        assert all(np.isfinite(value) for report in reports[stage] for value in report.values())
        assert (folder / f"{stage}.pt").exists()


def test_a_stage_goes_on_where_it_was(trained, config, shards, tmp_path: Path) -> None:
    _, reports, _ = trained
    first = Trainer(TINY, build_model(TINY, config), "reader", shards, steps=1)
    first.run(tmp_path / "reader.pt")
    resumed = Trainer(TINY, build_model(TINY, config), "reader", shards)
    resumed.load_state(tmp_path / "reader.pt")
    (report,) = resumed.run(tmp_path / "reader.pt")
    assert report["loss"] == pytest.approx(reports["reader"][1]["loss"], rel=0.05)


def test_a_folder_loads_and_speaks(
    trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, _ = trained
    model.save(tmp_path)
    loaded = PocketSpeech.load(tmp_path)
    assert loaded.config == model.config
    sequence = loaded.read("A red circle.", "ada")
    assert len(sequence.phonemes) == len(sequence.characters)
    # An untrained reader may say nothing.
    monkeypatch.setattr(
        loaded.reader, "read", lambda text, voice: PhonemeSequence([3, 4, 5], [0, 1, 2])
    )
    spoken = list(loaded.stream("abc", "ada", seed=1))
    again = list(loaded.stream("abc", "ada", seed=1))
    assert all(len(one.samples) == loaded.config.frame_samples for one in spoken)
    assert [character for one in spoken for character in one.began] == [0, 1, 2]
    assert torch.equal(
        torch.cat([one.samples for one in spoken]), torch.cat([one.samples for one in again])
    )
    with pytest.raises(PocketError) as refused:
        loaded.read("Hello.", "nobody")
    assert refused.value.param == "voice"


def test_other_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vits"}')
    with pytest.raises(PocketError) as refused:
        PocketConfig.load(tmp_path)
    assert refused.value.param == "model_type"


def test_the_real_sizes_fit_their_bounds(config) -> None:
    model = build_model(
        TINY, replace(PocketConfig(), voices=config.voices, phonemes=config.phonemes)
    )
    assert sum(parameter.numel() for parameter in model.parameters()) <= 12_000_000
