"""The speech engine on a GPU, or in the interpreter: it speaks the samples that it speaks on the CPU, in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from motet_kernels.audio.codec_conv import convolve
from motet_kernels.audio.packed_conv import PackedConv
from motet_shared.errors import ConfigError
from motet_tts.codecs import hifigan, seanet
from motet_tts.codecs import stream_context as contexts
from motet_tts.codecs.mimi import MimiDecoder
from motet_tts.config import EngineConfig
from motet_tts.engine.engine import Engine
from motet_tts.engine.utterance import Utterance
from motet_tts.pocket import codec as pocket_codec
from motet_tts.pocket.config import PocketConfig
from motet_tts.pocket.model import PocketSpeech
from support.checkpoints import tts_checkpoints
from support.running.refusals import refuses
from support.running.triton_modes import calls_of, without_triton

# Of samples whose peaks are about 1, as in tests/unit/motet_tts/test_tts_engine.py: float32 additions differ in order.
TOLERANCE = 1e-4
TEXTS = {"csm": ("hello you", "a star"), "pocket_tts": ("hello you", "a star")}
SHORT = ("hi", "o")
POCKET = PocketConfig(
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
    feed_forward=48,
    depth=16,
    max_phonemes=64,
    max_positions=256,
)


def motet_pocket(path: Path) -> Path:
    torch.manual_seed(3)
    model = PocketSpeech(POCKET)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
        model.speaker.advance.bias.copy_(
            torch.tensor([0.0, 2.0, 0.0, 0.0, 0.0])
        )  # so that it gets on
    model.save(path)
    return path


def vits(path: Path) -> Path:
    """It speaks fast: a chunk must have all of its vocoder's context, and steps take long in the interpreter."""
    tts_checkpoints.vits(path, speakers=2)
    settings = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(settings | {"speaking_rate": 80.0}))
    return path


MAKERS: dict[str, Callable[[Path], Path]] = {
    "csm": lambda path: tts_checkpoints.csm(path, sample=True),
    "pocket_tts": lambda path: tts_checkpoints.pocket_tts(path, sample=True),
    "speecht5": tts_checkpoints.speecht5,
    "vits": vits,
    "motet_pocket_tts": motet_pocket,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Checkpoints by family, each made once."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = MAKERS[family](tmp_path_factory.mktemp(family) / "model")
        return made[family]

    return make


def engine(path: Path, device: str, **options: Any) -> Engine:
    return Engine(
        EngineConfig(
            model=str(path),
            device=device,
            threads=1,
            **{"first_chunk": 0.002, "chunk": 0.006, **options},
        )
    )


def speech(speaker: Engine, texts: tuple[str, str], frames: int = 4) -> dict[Any, Tensor]:
    """Two sentences, of which the second comes later and so is in other chunks; a third is cancelled on its way."""
    parts: dict[Any, list[Tensor]] = {}

    def step() -> None:
        for piece in speaker.step():
            assert piece.error is None
            assert piece.samples is not None
            assert piece.samples.device.type == "cpu"
            parts.setdefault(piece.key, []).append(piece.samples)

    for number, text in enumerate(texts):
        voice = speaker.voices[number % len(speaker.voices)]
        speaker.add(
            number,
            Utterance(words=tuple(text.split()), voice=voice, seed=number, max_frames=frames),
        )
        if not number:
            speaker.add("gone", Utterance(words=("a",), voice=speaker.voices[0], max_frames=frames))
        step()
        speaker.cancel("gone")
    while speaker.has_work:
        step()
        speaker.check_integrity()
    parts.pop("gone", None)
    return {key: torch.cat(samples) for key, samples in parts.items()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", MAKERS)
def test_it_speaks_as_on_the_cpu(
    device: torch.device,
    folder: Callable[[str], Path],
    family: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches = [
        calls_of(monkeypatch, module, "convolve") for module in (seanet, hifigan, pocket_codec)
    ]
    with without_triton():
        due = speech(engine(folder(family), "cpu"), TEXTS.get(family, SHORT))
    assert not any(launches)
    speaker = engine(folder(family), str(device), dtype="float32")
    said = speaker.describe()
    assert (said["device"], said["dtype"], said["kernels"]) == (
        str(speaker.model.device),
        "float32",
        "triton",
    )
    found = speech(speaker, TEXTS.get(family, SHORT))
    assert any(launches), "no kernel was asked: the codec computes as on a CPU"
    assert found.keys() == due.keys() == {0, 1}
    for key, wanted in due.items():
        assert wanted.abs().max() > 0.01, "the reference is silent: nothing would be proved"
        if (
            family == "motet_pocket_tts"
        ):  # the phase of a harmonic adds up the pitch, so that a rounding of it grows
            assert float((found[key] - wanted).square().mean().sqrt()) < 0.1 * float(
                wanted.square().mean().sqrt()
            )
        else:
            torch.testing.assert_close(
                found[key], wanted, rtol=0, atol=TOLERANCE * max(1.0, float(wanted.abs().max()))
            )


@pytest.mark.parametrize(("family", "share"), [("csm", 0.03), ("vits", 0.05)])
@pytest.mark.timeout(600)
def test_sixteen_bits_give_nearly_what_the_modules_give(
    device: torch.device, folder: Callable[[str], Path], family: str, share: float
) -> None:
    """Of the same type on the same device; a share of the loudness differs."""
    with without_triton():
        due = speech(
            engine(folder(family), str(device), dtype="bfloat16"),
            TEXTS.get(family, SHORT),
            frames=3,
        )
    found = speech(
        engine(folder(family), str(device), dtype="bfloat16"), TEXTS.get(family, SHORT), frames=3
    )
    for key, wanted in due.items():
        assert found[key].shape == wanted.shape
        assert float((found[key] - wanted).square().mean().sqrt()) < share * float(
            wanted.square().mean().sqrt()
        )


def test_the_checkpoint_s_own_type_on_a_gpu(device: torch.device, tmp_path: Path) -> None:
    path = tts_checkpoints.vits(tmp_path / "model", stochastic=False)
    settings = path / "config.json"
    settings.write_text(settings.read_text().replace('"dtype": "float32"', '"dtype": "float16"'))
    assert engine(path, str(device)).describe()["dtype"] == "float16"
    with without_triton():
        assert engine(path, "cpu").describe()["dtype"] == "float32"
        with refuses(ConfigError, "dtype"):
            engine(path, "cpu", dtype="float16")


def test_a_device_that_is_not_there_is_refused(
    device: torch.device, folder: Callable[[str], Path]
) -> None:
    for wanted, param in (
        ("cuda:77", "device"),
        ("tpu", "device"),
    ):
        with refuses(ConfigError, param):
            engine(folder("csm"), wanted)


# ------------------------------------------------------------------------------------------------------------- places
def test_places_are_free_again_when_nobody_is_left(
    device: torch.device, folder: Callable[[str], Path]
) -> None:
    speaker = engine(folder("csm"), str(device))
    codec: Any = speaker.model.family.codec  # type: ignore[attr-defined]
    assert isinstance(codec, MimiDecoder)
    assert codec.fused is not None
    free = codec.fused.contexts.free
    for key in "abc":
        speaker.add(key, Utterance(words=("a",), voice="0", max_frames=2))
    speaker.step()
    assert codec.fused.contexts.free == free - 3
    speaker.cancel("b")
    while speaker.has_work:
        speaker.step()
    assert codec.fused.contexts.free == free


@torch.inference_mode()
def test_more_streams_than_there_is_room_for(device: torch.device) -> None:
    """What the first ones remember stays when room is made for others."""
    conv = PackedConv.of(nn.Conv1d(3, 2, 4).to(device))
    alone, crowded = contexts.ContextBuffers([conv]), contexts.ContextBuffers([conv])
    x = torch.randn(2, 1, 5, 3, generator=torch.Generator().manual_seed(0)).to(device)
    ends = []
    for memory, company in ((alone, 0), (crowded, 20)):
        stream = memory.begin()
        convolve(x[0], conv, context=memory.next_contexts([stream])[0])
        memory.commit([stream])
        others = [memory.begin() for _ in range(company)]
        assert len({one.pair for one in [stream, *others]}) == 1 + company
        many = torch.cat([x[1], *[x[0]] * company])
        ends.append(convolve(many, conv, context=memory.next_contexts([stream, *others])[0])[0])
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-5)


def test_a_decoder_of_other_parts_computes_as_it_did(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.upsample, self.decoder_seanet = None, nn.Module()
            self.decoder_seanet.layers = nn.ModuleList([nn.GELU(), nn.Linear(2, 2)])

    assert seanet.fused_seanet(Other().to(device)) is None
    assert "Other is not fused: decoder: a GELU" in caplog.text
