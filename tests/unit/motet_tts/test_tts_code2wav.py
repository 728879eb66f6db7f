"""Qwen3-Omni's code2wav as a stream: the samples of transformers, however the frames are chunked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from motet_tts.codecs.code2wav import Code2Wav, load_code2wav, reach_of
from motet_tts.config import EngineConfig
from motet_tts.engine.engine import Engine
from motet_tts.engine.utterance import Utterance
from support.families import qwen3_omni as omni

EXACT = 1e-5
FRAMES = 40  # several windows of attention and of the convolutions


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("omni")
    omni.write(folder)
    return load_code2wav(folder)


def codes_of(seed: int, count: int = FRAMES) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(omni.CODES, (count, omni.GROUPS), generator=generator)


@torch.inference_mode()
def whole(model: Any, codes_NQ: torch.Tensor) -> torch.Tensor:
    samples: torch.Tensor = model.chunked_decode(codes_NQ.T.unsqueeze(0))[0, 0]
    return samples


def streamed(codec: Code2Wav, codes_NQ: torch.Tensor, chunk: int) -> torch.Tensor:
    state, parts = codec.begin(), []
    for part in codes_NQ.split(chunk):
        parts += codec.decode([state], part.unsqueeze(0))
    rest = codec.finish(state)
    return torch.cat([*parts, *([] if rest is None else [rest])])


@pytest.mark.long(after=1)
@pytest.mark.parametrize("chunk", [3, 1, FRAMES])
def test_a_stream_has_the_samples_of_transformers(model: Any, chunk: int) -> None:
    codes_NQ = codes_of(0)
    expected = whole(model, codes_NQ)
    assert expected.std() > 0.02
    assert expected.abs().max() < 1  # nothing is clipped
    found = streamed(Code2Wav(model), codes_NQ, chunk)
    torch.testing.assert_close(found, expected, atol=EXACT, rtol=0)


def test_replies_of_different_ages_share_a_step(model: Any) -> None:
    codec = Code2Wav(model)
    first, second = codes_of(1, 20), codes_of(2, 12)
    states = [codec.begin(), codec.begin()]
    parts: list[list[torch.Tensor]] = [[], []]
    parts[0] += codec.decode(states[:1], first[:8].unsqueeze(0))
    for start in range(0, 12, 4):
        both = torch.stack((first[8 + start : 12 + start], second[start : start + 4]))
        for kept, samples in zip(parts, codec.decode(states, both), strict=True):
            kept.append(samples)
    for kept, state, codes_NQ in zip(parts, states, (first, second), strict=True):
        rest = codec.finish(state)
        assert rest is not None
        found = torch.cat([*kept, rest])
        torch.testing.assert_close(found, whole(model, codes_NQ), atol=EXACT, rtol=0)


def test_a_sample_waits_for_one_frame_at_most(model: Any) -> None:
    before, behind = reach_of(model)
    assert behind == 1
    assert before < 40
    codec = Code2Wav(model)
    assert len(codec.decode([codec.begin()], codes_of(3, 5)[None])[0]) == 4 * codec.frame_samples


def test_codes_of_a_reply_that_waits_are_kept(tmp_path: Path) -> None:
    """A talker does not wait for the engine: a reply has all of its codes once it is admitted."""
    omni.write(tmp_path / "model")
    engine = Engine(EngineConfig(model=str(tmp_path / "model"), max_running=1))
    replies = {key: codes_of(number, 12).flatten().tolist() for number, key in enumerate("abc")}
    for key in replies:
        engine.add(key, Utterance(words=(), voice=omni.VOICES[0]))
    engine.step()
    engine.feed("b", replies["b"][:5], last=False)
    engine.feed("b", replies["b"][5:], last=True)
    engine.feed("c", replies["c"], last=True)
    engine.cancel("c")
    engine.feed("a", replies["a"], last=True)
    frames = {}
    for _ in range(100):
        for output in engine.step():
            frames[output.key] = output.frames
    assert frames == {"a": 12, "b": 12}
    assert not engine.has_work
    engine.check_integrity()


@pytest.mark.parametrize("ends_apart", [False, True])
def test_when_codes_come_changes_no_bit(tmp_path: Path, ends_apart: bool) -> None:
    omni.write(tmp_path / "model")
    engine = Engine(EngineConfig(model=str(tmp_path / "model"), first_chunk=0.002, chunk=0.008))
    codes = codes_of(4, FRAMES).flatten().tolist()
    sounds = []
    for size in (len(codes), omni.GROUPS, 3 * omni.GROUPS + 1):
        key = f"in pieces of {size}"
        engine.add(key, Utterance(words=(), voice=omni.VOICES[0]))
        parts = []
        for start in range(0, len(codes), size):
            last = start + size >= len(codes) and not ends_apart
            engine.feed(key, codes[start : start + size], last=last)
            parts += engine.step()
        if ends_apart:
            engine.feed(key, (), last=True)
        for _ in range(100):
            parts += engine.step()
        assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
        assert parts[-1].frames == FRAMES
        sounds.append(torch.cat([part.samples for part in parts if part.samples is not None]))
    assert all(torch.equal(sound, sounds[0]) for sound in sounds)
