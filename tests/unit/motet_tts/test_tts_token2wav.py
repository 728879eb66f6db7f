"""Code2wav as a stream: exact where all fits a window, and close to the whole otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from motet_shared.errors import ConfigError
from motet_tts.codecs.token2wav import Speaker, Token2Wav, load_token2wav
from motet_tts.models.noise import Noise
from support.families import omni

# Of samples whose peaks are about 1: whole windows differ by the order of additions alone; streams
# also by what lies beyond the blocks around a window.
EXACT, STREAMED = 1e-4, 2e-2
CODES = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("omni")
    omni.write(path)
    return path


def frames_of(codec: Token2Wav, count: int, voice: int = 1) -> tuple[list[int], torch.Tensor]:
    codes = torch.randint(omni.CODES, (count,), generator=torch.Generator().manual_seed(3)).tolist()
    noise = [Noise(7, 0, number).normal(*codec.noise_shape) for number in range(count)]
    made = [codec.frame(code, voice, one) for code, one in zip(codes, noise, strict=True)]
    return codes, torch.stack(made)


@contextmanager
def given_noise(noise: torch.Tensor) -> Iterator[None]:
    def drawn(*_: Any, **__: Any) -> torch.Tensor:
        return noise

    with mock.patch("torch.randn", drawn):
        yield


def whole(folder: Path, count: int) -> tuple[Token2Wav, torch.Tensor, torch.Tensor]:
    """Return our codec, its frames, and the waveform of transformers."""
    model, speakers = load_token2wav(folder)
    codec = Token2Wav(model, list(speakers.values()))
    codes, frames_NK = frames_of(codec, count)
    speaker = list(speakers.values())[1]
    noise = frames_NK[:, 2:].reshape(1, -1, codec.noise_shape[1])
    with given_noise(noise), torch.inference_mode():
        expected = model(torch.tensor([codes]), speaker.conditioning, speaker.reference)
    return codec, frames_NK, expected


def streamed(codec: Token2Wav, frames_NK: torch.Tensor, chunk: int) -> torch.Tensor:
    state, parts = codec.begin(), []
    for part in frames_NK.split(chunk):
        parts += codec.decode([state], part.unsqueeze(0))
    rest = codec.finish(state)
    return torch.cat([*parts, *([] if rest is None else [rest])])


def test_a_short_reply_has_the_samples_of_transformers(folder: Path) -> None:
    codec, frames_NK, expected = whole(folder, 4)
    assert codec.frame_samples * 4 == len(expected)
    torch.testing.assert_close(streamed(codec, frames_NK, 1), expected, atol=EXACT, rtol=0)
    torch.testing.assert_close(streamed(codec, frames_NK, 3), expected, atol=EXACT, rtol=0)


def test_a_stream_stays_close_to_the_whole(folder: Path) -> None:
    codec, frames_NK, expected = whole(folder, CODES)
    peak = expected.abs().max()
    first = streamed(codec, frames_NK, 5)
    assert len(first) == len(expected)
    deviation = (first - expected).abs().max() / peak
    assert deviation < STREAMED
    state = codec.begin()
    assert len(codec.decode([state], frames_NK[None, :20])[0])  # samples come before the last code


def test_two_replies_of_different_voices_share_a_step(folder: Path) -> None:
    model, speakers = load_token2wav(folder)
    codec = Token2Wav(model, list(speakers.values()))
    both = [frames_of(codec, 12, voice)[1] for voice in (0, 1)]
    states = [codec.begin(), codec.begin()]
    codec.decode(states, torch.stack(both))
    for state, frames_NK in zip(states, both, strict=True):
        alone = codec.begin()
        codec.decode([alone], frames_NK.unsqueeze(0))
        together, single = codec.finish(state), codec.finish(alone)
        assert together is not None
        assert single is not None
        torch.testing.assert_close(together, single, atol=EXACT, rtol=0)


@pytest.mark.parametrize("damage", [b"no dictionary", None])
def test_voices_that_cannot_be_read_are_named(folder: Path, damage: bytes | None) -> None:
    path = folder / "spk_dict.pt"
    kept = path.read_bytes()
    try:
        if damage is None:
            path.unlink()
        else:
            path.write_bytes(damage)
        with pytest.raises(ConfigError, match="spk_dict"):
            load_token2wav(folder)
    finally:
        path.write_bytes(kept)


def test_a_voice_of_another_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match="spk_dict"):
        Speaker.of("x", {"cond": torch.zeros(3), "ref_mel": torch.zeros(1, 2, 3), "bos_token": 1})
