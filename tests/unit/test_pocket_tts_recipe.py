"""The pocket-tts modules and their recipe in small: reading, coding, speaking, and a folder that speaks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("espeakng_loader")

import tts_data  # noqa: E402
import tts_features  # noqa: E402
import tts_losses  # noqa: E402
from motet_tts.pocket.config import PocketConfig  # noqa: E402
from motet_tts.pocket.model import PocketSpeech  # noqa: E402
from motet_tts.pocket.reader import Reading  # noqa: E402
from motet_tts.pocket.speaker import Pointer  # noqa: E402
from motet_tts.pocket.synth import Controls, Synth  # noqa: E402
from pocket_tts import STAGES, Trainer, build_config, build_model  # noqa: E402
from speech_sentences import HELD_OUT_SEEDS, is_held_out  # noqa: E402
from tts_recipe import Recipe, Stage  # noqa: E402

SHORT = Stage(steps=2, batch=3, matrix_lr=0.01, other_lr=1e-3, warmup=1)
TINY = Recipe(inventory_sentences=60, settle=1, segment=8, reader=SHORT, codec=SHORT, speaker=SHORT)
SIZES = {
    **{"bands": 24, "codebooks": 2, "codes": 16, "latent": 8, "codec_width": 32, "codec_layers": 1},
    **{"reader_width": 64, "reader_layers": 1, "hidden": 64, "layers": 1, "heads": 2, "kv_heads": 1},
    **{"feed_forward": 64, "depth": 32},
}


@pytest.fixture(scope="module")
def config() -> PocketConfig:
    return build_config(TINY, **SIZES)


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory: pytest.TempPathFactory):
    model = build_model(TINY, config)
    folder = tmp_path_factory.mktemp("tts")
    return model, {stage: Trainer(TINY, model, stage).run(folder / f"{stage}.pt") for stage in STAGES}, folder


@pytest.fixture(scope="module")
def example(config):
    made = tts_data.example(config, tts_data.training_line(TINY, -1))
    assert made is not None
    return made


# Examples


def test_a_line_is_a_function_of_seed_and_index() -> None:
    once, again = (tts_data.training_line(TINY, 5) for _ in range(2))
    assert once.text == again.text
    np.testing.assert_array_equal(once.speech.samples, again.speech.samples)


def test_training_refuses_held_out_seeds_and_sentences() -> None:
    with pytest.raises(ValueError, match="held out"):
        tts_data.training_line(replace(TINY, seed=HELD_OUT_SEEDS.start), 0)
    assert not any(is_held_out(tts_data.training_line(TINY, index).text) for index in range(20))
    assert is_held_out(tts_data.held_out_text("question", 3))


def test_pointers_walk_to_the_end_without_leaping(config, example) -> None:
    steps = [after - before for before, after in pairwise(example.pointers)]
    assert example.pointers[0] == 0
    assert example.pointers[-1] == len(example.phonemes)
    assert min(steps) >= 0
    assert max(steps) < config.advances
    assert len(example.samples) == config.frame_samples * (len(example.pointers) - 1)
    assert len(example.features) == config.stride * (len(example.pointers) - 1)


@pytest.mark.parametrize("hertz", [90.0, 150.0, 330.0])
def test_the_pitch_of_a_buzz_is_found(hertz: float) -> None:
    time = np.arange(24_000) / 24_000
    buzz = np.sum([np.sin(2 * np.pi * hertz * k * time) / k for k in range(1, 12)], axis=0)
    found = tts_features.pitch(buzz.astype(np.float32), 24_000, 240)
    np.testing.assert_allclose(found[5:-5], hertz, rtol=0.02)


def test_noise_has_no_pitch() -> None:
    noise = np.random.default_rng(0).standard_normal(24_000).astype(np.float32)
    assert (tts_features.pitch(noise, 24_000, 240) > 0).mean() < 0.05


def test_examples_come_in_order_from_processes() -> None:
    assert list(tts_data.ahead(abs, -3, 9, makers=1)) == [3, 2, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8]


# Synthesizer and codec


def test_harmonics_have_their_pitch_and_their_loudness() -> None:
    synth = Synth(24_000, 240, 24)
    bands = torch.full((1, 50, 24), -12.0)
    loud = bands.clone()
    loud[..., :4] = -1.0
    made = synth.render([synth.begin()], Controls(torch.full((1, 50), 200.0), loud, bands), [0])[0].numpy()
    spectrum = np.abs(np.fft.rfft(made[2400:]))
    assert np.argmax(spectrum) * 24_000 / len(made[2400:]) == pytest.approx(200.0, abs=5)
    silent = synth.render([synth.begin()], Controls(torch.zeros(1, 50), loud, bands), [0])
    assert float(silent.abs().max()) < 1e-3


def test_samples_do_not_depend_on_how_frames_are_cut(trained) -> None:
    model, _, _ = trained
    codec = model.codec.eval()
    codes = torch.randint(16, (2, 9, 2), generator=torch.Generator().manual_seed(1))
    whole = codec.decode([codec.begin(3), codec.begin(4)], codes)
    alone = codec.begin(4)
    pieces = torch.cat([codec.decode([alone], codes[1:, start:stop]) for start, stop in ((0, 1), (1, 4), (4, 9))], 1)
    assert whole.shape == (2, 9 * model.config.frame_samples)
    assert float((whole[1:] - pieces).abs().max()) < 1e-3 * float(whole.abs().max())


def test_codes_stand_for_the_latents_that_the_quantizer_says(trained) -> None:
    quantizer = trained[0].codec.quantizer
    codes, said = quantizer(torch.randn(2, 5, 8))
    assert torch.allclose(quantizer.decode(codes), said, atol=1e-5)


def test_idle_codebook_entries_move(trained, example) -> None:
    codec = trained[0].codec
    before = codec.quantizer.books.detach().clone()
    moved = tts_losses.revive(codec, example.features[None], torch.Generator().manual_seed(0))
    assert moved > 0
    assert int((before != codec.quantizer.books).any(-1).sum()) == moved


# Speaker


def test_a_pointer_moves_and_counts() -> None:
    pointer = Pointer([7, 8, 9])
    assert pointer.columns(99) == [0, 0, 7, 8, 9]
    pointer.move(0)
    assert pointer.columns(99) == [1, 0, 7, 8, 9]
    pointer.move(2)
    assert pointer.columns(99) == [0, 2, 9, 99, 99]
    assert not pointer.done
    pointer.move(1)
    assert pointer.done


def test_training_walks_as_the_speaker_will(trained, example) -> None:
    speaker = trained[0].speaker
    codes = torch.zeros(len(example.pointers) - 1, 2, dtype=torch.long)
    frames = tts_losses.walk(speaker.end, example, codes)
    pointer = Pointer(list(example.phonemes))
    for row, (before, after) in zip(frames, pairwise(example.pointers), strict=True):
        pointer.move(after - before)
        assert row[2:].tolist() == pointer.columns(speaker.end)
    assert pointer.done


# The recipe in small


def test_every_stage_runs_and_its_losses_are_finite(trained) -> None:
    _, reports, folder = trained
    for stage in STAGES:
        assert len(reports[stage]) == 2
        assert all(np.isfinite(value) for report in reports[stage] for value in report.values())
        assert (folder / f"{stage}.pt").exists()


def test_a_stage_goes_on_where_it_was(trained, config, tmp_path: Path) -> None:
    _, reports, _ = trained
    first = Trainer(TINY, build_model(TINY, config), "reader", steps=1)
    first.run(tmp_path / "reader.pt")
    resumed = Trainer(TINY, build_model(TINY, config), "reader")
    resumed.load_state(tmp_path / "reader.pt")
    (report,) = resumed.run(tmp_path / "reader.pt")
    assert report["loss"] == pytest.approx(reports["reader"][1]["loss"], rel=0.05)


def test_a_folder_loads_and_speaks(trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, _ = trained
    model.save(tmp_path)
    loaded = PocketSpeech.load(tmp_path)
    assert loaded.config == model.config
    reading = loaded.read("A red circle.", "ada")
    assert len(reading.phonemes) == len(reading.characters)
    # An untrained reader may say nothing.
    monkeypatch.setattr(loaded.reader, "read", lambda text, voice: Reading([3, 4, 5], [0, 1, 2]))
    spoken = list(loaded.stream("abc", "ada", seed=1))
    again = list(loaded.stream("abc", "ada", seed=1))
    assert all(len(one.samples) == loaded.config.frame_samples for one in spoken)
    assert [character for one in spoken for character in one.began] == [0, 1, 2]
    assert torch.equal(torch.cat([one.samples for one in spoken]), torch.cat([one.samples for one in again]))
    with pytest.raises(ValueError, match="voice 'nobody' is unknown"):
        loaded.read("Hello.", "nobody")


def test_other_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vits"}')
    with pytest.raises(ValueError, match="no pocket-tts"):
        PocketConfig.load(tmp_path)


def test_the_real_sizes_fit_their_bounds(config) -> None:
    model = build_model(TINY, replace(PocketConfig(), voices=config.voices, phonemes=config.phonemes))
    assert sum(parameter.numel() for parameter in model.parameters()) <= 12_000_000
