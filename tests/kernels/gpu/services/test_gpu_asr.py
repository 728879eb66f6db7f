"""The speech recognition engines on a GPU, or in the interpreter: they hear what they hear on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSpeechSeq2Seq, GenerationConfig

from motet_asr.checkpoint import load_engine
from motet_asr.config import EngineConfig
from motet_asr.engine.engine import Engine
from motet_asr.engine.request import TranscriptionOptions, WindowResult
from motet_asr.engine.slot_engine import SlotEngine
from motet_asr.models.rules import RowState, WhisperRules
from motet_asr.models.whisper import Whisper
from support.checkpoints.asr_checkpoints import (
    RATE,
    noise,
    tiny_moonshine,
    tiny_parakeet,
    tiny_whisper,
)
from support.running.triton_modes import calls_of, without_triton

# Short, because the interpreter is slow.
SOUNDS = [noise(0.3, 0), noise(0.2, 1)]
# One finds the language out and times its words, one has a prompt and draws.
OPTIONS = [
    TranscriptionOptions(words=True, timestamps=False),
    TranscriptionOptions(language="en", prompt="ab", temperature=0.7, seed=3, timestamps=False),
]
LAYERS = 2


def engine_of(path: Path, device: str, **settings: Any) -> Engine:
    return load_engine(EngineConfig(model=str(path), device=device, fallback=False, **settings))


def hear(engine: Engine, options: list[TranscriptionOptions] = OPTIONS) -> list[WindowResult]:
    """As many sounds as there are options, at once."""
    for key, (sound, option) in enumerate(zip(SOUNDS, options, strict=False)):
        engine.add(key, engine.prepare(sound), len(sound) / RATE, option)
    heard: dict[Any, WindowResult] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.result is not None, output.error
            heard[output.key] = output.result
    engine.check_integrity()
    return [heard[key] for key in range(len(options))]


def on_cpu(
    path: Path, options: list[TranscriptionOptions] = OPTIONS, **settings: Any
) -> list[WindowResult]:
    with without_triton():
        return hear(engine_of(path, "cpu", **settings), options)


def check(found: list[WindowResult], due: list[WindowResult], near: float = 1e-4) -> None:
    for one, other in zip(found, due, strict=True):
        assert one.language == other.language
        for passed, wanted in zip(one.passes, other.passes, strict=True):
            assert passed.tokens == wanted.tokens
            assert (passed.seek, passed.frames) == (wanted.seek, wanted.frames)
            assert passed.avg_logprob == pytest.approx(wanted.avg_logprob, abs=near)
            assert passed.no_speech_prob == pytest.approx(wanted.no_speech_prob, abs=near)
            assert (passed.attention_NTF is None) == (wanted.attention_NTF is None)
            if passed.attention_NTF is not None:
                assert passed.attention_NTF.device.type == "cpu"
                torch.testing.assert_close(
                    passed.attention_NTF, wanted.attention_NTF, atol=near, rtol=near
                )


@pytest.mark.timeout(600)
def test_whisper_says_what_it_says_on_the_cpu(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_whisper(tmp_path, max_length=3)
    due = on_cpu(path, padding=0.1)
    engine = engine_of(path, str(device), padding=0.1)
    from motet_kernels.gpu.attention import full_attention, kv, paged_attention
    from motet_kernels.gpu.audio import log_mel

    heard = calls_of(monkeypatch, log_mel, "log_mel")
    encoded = calls_of(monkeypatch, full_attention, "packed_attention")
    stored = calls_of(monkeypatch, kv, "store_kv")
    attended = calls_of(monkeypatch, paged_attention, "paged_attention")
    check(hear(engine), due)
    assert len(heard) == len(SOUNDS)
    assert len(encoded) == LAYERS, "both windows together"
    assert len(stored) > 0
    assert len(attended) == 2 * len(stored), "to itself and to the encoder"
    said = engine.family.describe()
    assert (said["weights"], said["dtype"], said["kernels"]) == ("float32", "float32", "triton")
    assert torch.device(said["device"]).type == device.type


@pytest.mark.timeout(600)
def test_timestamps_and_the_passes_that_they_make(device: torch.device, tmp_path: Path) -> None:
    path = tiny_whisper(tmp_path, max_length=4)
    options = [TranscriptionOptions(language="en")]
    due = on_cpu(path, options, padding=0.04)
    check(hear(engine_of(path, str(device), padding=0.04), options), due)


@pytest.mark.parametrize(
    ("dtype", "weights"),
    [(torch.bfloat16, "auto"), (torch.float16, "auto"), (torch.bfloat16, "int8")],
)
@pytest.mark.timeout(600)
def test_whisper_computes_in_the_checkpoints_type(
    device: torch.device, tmp_path: Path, dtype: torch.dtype, weights: str
) -> None:
    path = tiny_whisper(tmp_path, max_length=4)
    with without_triton():
        exact = states(engine_of(path, "cpu"))
    AutoModelForSpeechSeq2Seq.from_pretrained(path, dtype=dtype).save_pretrained(path)
    engine = engine_of(path, str(device), weights=weights)
    assert isinstance(engine, SlotEngine)
    assert engine.family.describe()["dtype"] == str(dtype).removeprefix("torch.")
    assert engine.slots.self_kv.dtype == dtype
    for found, due in zip(states(engine), exact, strict=True):
        assert (found - due).norm() < (0.2 if weights == "int8" else 0.05) * due.norm()


def states(engine: Engine) -> list[torch.Tensor]:
    """Encoder states of two windows, and decoder states of two prompts and of the step behind them."""
    family = engine.family
    assert isinstance(family, Whisper)
    assert family._encoder is not None
    decoder, slots = family.decoder, family.decoder.slots(2)
    generator = torch.Generator().manual_seed(0)
    windows = [
        torch.randn(80, frames, generator=generator).to(family.device) for frames in (24, 16)
    ]
    with torch.inference_mode():
        encoded = family._encoder(windows)
        for row, encoded_SE in enumerate(encoded):
            assert slots.add(len(encoded_SE)) == row
            decoder.load_cross(slots, row, encoded_SE)
        found = [*encoded, decoder.prefill(slots, 0, [[5, 6, 7], [8, 9, 10]])]
        found.append(decoder.step(slots, [11, 12], [])[0])
    return [one.float().cpu() for one in found]


@pytest.mark.parametrize("make", [tiny_moonshine, tiny_parakeet])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_families_say_what_they_say_on_the_cpu(
    device: torch.device, tmp_path: Path, make: Callable[[Path], Path], dtype: torch.dtype
) -> None:
    path = make(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")})
    )
    plain = [TranscriptionOptions()] * len(SOUNDS)
    due = on_cpu(path, plain, dtype=str(dtype).removeprefix("torch."))
    engine = engine_of(path, str(device))
    assert engine.family.describe()["dtype"] == str(dtype).removeprefix("torch.")
    check(hear(engine, plain), due, near=1e-4 if dtype == torch.float32 else 0.05)


@pytest.mark.parametrize("seed", range(6))
def test_one_mask_forbids_what_the_rules_forbid(device: torch.device, seed: int) -> None:
    vocab, rows = 60, 7
    generation = GenerationConfig(
        eos_token_id=30,
        no_timestamps_token_id=39,
        suppress_tokens=[1, 2, 99],
        begin_suppress_tokens=[3, 30],
        max_initial_timestamp_index=4,
    )
    generator = np.random.default_rng(seed)
    states = []
    for row in range(rows):
        said = generator.integers(35, vocab, size=generator.integers(0, 4)).tolist() if row else []
        states.append(RowState(said, bool(generator.integers(0, 2)), 0.5 if row == 3 else 0.0, row))
    logits = torch.from_numpy(generator.normal(scale=3, size=(rows, vocab))).float()
    due_logits, logits = logits.clone(), logits.to(device)
    with without_triton():
        due = WhisperRules(generation, vocab, torch.device("cpu")).pick(due_logits, states)
    tokens, logprobs = WhisperRules(generation, vocab, device).pick(logits, states)
    assert tokens == due[0]
    assert logprobs == pytest.approx(due[1], abs=1e-5)
    torch.testing.assert_close(logits.cpu(), due_logits, rtol=0, atol=0)
