"""Test the untrained parts of pocket-tts: pitch, synthesizer, codebooks, pointer."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("espeakng_loader")

from motet_tts.pocket.codec import later  # noqa: E402
from motet_tts.pocket.frame_generator import Pointer  # noqa: E402
from motet_tts.pocket.synth import Controls, Synth  # noqa: E402
from recipes.training.errors import RecipeError  # noqa: E402
from recipes.tts import features as tts_features  # noqa: E402
from recipes.tts.codebooks import k_means  # noqa: E402


@pytest.mark.parametrize("hertz", [90.0, 150.0, 330.0])
def test_the_pitch_of_a_buzz_is_found(hertz: float) -> None:
    time = np.arange(24_000) / 24_000
    buzz = np.sum([np.sin(2 * np.pi * hertz * k * time) / k for k in range(1, 12)], axis=0)
    found = tts_features.pitch(buzz.astype(np.float32), 24_000, 240)
    np.testing.assert_allclose(found[5:-5], hertz, rtol=0.02)


def test_noise_has_no_pitch() -> None:
    noise = np.random.default_rng(0).standard_normal(24_000).astype(np.float32)
    assert (tts_features.pitch(noise, 24_000, 240) > 0).mean() < 0.05


def test_harmonics_have_their_pitch_and_their_loudness() -> None:
    synth = Synth(24_000, 240, 24)
    bands = torch.full((1, 50, 24), -12.0)
    loud = bands.clone()
    loud[..., :4] = -1.0
    made = synth.render([synth.begin()], Controls(torch.full((1, 50), 200.0), loud, bands), [0])[
        0
    ].numpy()
    spectrum = np.abs(np.fft.rfft(made[2400:]))
    assert np.argmax(spectrum) * 24_000 / len(made[2400:]) == pytest.approx(200.0, abs=5)
    silent = synth.render([synth.begin()], Controls(torch.zeros(1, 50), loud, bands), [0])
    assert float(silent.abs().max()) < 1e-3


def test_centres_are_found() -> None:
    generator = torch.Generator().manual_seed(2)
    centres = torch.randn(16, 8, generator=generator) * 5
    latents = centres[torch.randint(16, (600,), generator=generator)] + 0.05 * torch.randn(
        600, 8, generator=generator
    )
    found = k_means(latents, 24, generator)
    away = torch.cdist(centres, found).min(1).values
    assert int((away < 0.2).sum()) >= 12  # it may share a centre between two, never lose it
    assert float(away.max()) < float(torch.cdist(centres, centres).max()) / 2
    with pytest.raises(RecipeError) as refused:
        k_means(latents[:10], 24, generator)
    assert refused.value.param == "latents_ND"


def test_frames_are_shifted_ahead_for_the_synthesizer() -> None:
    values = torch.arange(6.0)[None]
    assert later(values, 2)[0].tolist() == [2, 3, 4, 5, 5, 5]
    assert later(values, 0)[0].tolist() == [0, 1, 2, 3, 4, 5]


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


def test_a_pointer_moves_when_a_phoneme_is_likelier_over_than_not() -> None:
    pointer = Pointer([7, 8, 9])
    stays = []
    for chances in ([0.9, 0.1, 0.0], [0.8, 0.2, 0.0], [0.6, 0.3, 0.1]):
        pointer.step(chances)
        stays.append(pointer.place)
    assert stays == [0, 0, 1]
    pointer.step([0.3, 0.2, 0.5])
    assert pointer.done
    slow = Pointer([7])
    while not slow.done:
        assert slow.since < 100
        slow.step([1.0, 0.0])
