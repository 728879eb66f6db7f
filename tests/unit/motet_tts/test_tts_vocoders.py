"""Test that a vocoder's pieces are the whole, however they fall."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import VitsModel

from motet_tts.codecs.vocoders import Latents, Vocoder, _Streams, _Windows, vocoder_of
from support.checkpoints import tts_checkpoints


def pieces(vocoder: Vocoder, frames_FT: Tensor, speaker: Tensor | None, size: int) -> list[Tensor]:
    latents, made = Latents(frames_FT, speaker), []
    while latents.at < latents.total:
        end = vocoder.due(latents, 1, size)
        made += vocoder.decode([latents], [end])
    return made


@pytest.mark.parametrize("speakers", [1, 3])
@torch.inference_mode()
def test_streams_and_windows_equal_the_whole(tmp_path: Path, speakers: int) -> None:
    model = VitsModel.from_pretrained(tts_checkpoints.vits(tmp_path / "vits", speakers=speakers))
    decoder = model.eval().decoder
    torch.manual_seed(0)
    frames_FT = torch.randn(8, 45)
    speaker = model.embed_speaker(torch.tensor([2]))[..., None] if speakers > 1 else None
    whole = decoder(frames_FT[None], speaker)[0, 0]
    for vocoder in (_Streams(decoder), _Windows(decoder, decoder)):
        for size in (1, 4, 45):
            got = torch.cat(pieces(vocoder, frames_FT, speaker, size))
            torch.testing.assert_close(got, whole, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_a_stream_computes_nothing_twice_and_can_be_decoded_again(tmp_path: Path) -> None:
    decoder = VitsModel.from_pretrained(tts_checkpoints.vits(tmp_path / "vits")).eval().decoder
    vocoder = vocoder_of(decoder)
    torch.manual_seed(0)
    frames_FT = torch.randn(8, 60)
    made = pieces(vocoder, frames_FT, None, 6)
    assert {len(piece) for piece in made[1:-1]} == {6 * 32}  # no more than its frames
    assert len(made[0]) >= 1
    latents = Latents(frames_FT, None)
    vocoder.decode([latents], [30])
    again = Latents(frames_FT, None, latents.at, latents.kept)
    (first,), (second,) = vocoder.decode([latents], [40]), vocoder.decode([again], [40])
    assert torch.equal(first, second)
    short = pieces(vocoder, frames_FT[:, :1], None, 6)
    torch.testing.assert_close(
        torch.cat(short), decoder(frames_FT[None, :, :1])[0, 0], rtol=0, atol=1e-5
    )
