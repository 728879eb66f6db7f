"""Qwen3-Omni through its services: text, frames and sound of the model, at a talker that moves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from motet_tts.codecs.code2wav import load_code2wav
from motet_tts.shaper import Shaper
from support.families import processed_vlms
from support.families import qwen3_omni as omni
from support.families.hearing import recording
from support.media.sound_files import EXACT, encoded
from support.stages.omni_stage import PROMPT, TOKENS, services

pytestmark = pytest.mark.long
FRAMES = 160
VOICE = "ethan"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("omni")
    return folder, omni.write(folder)


def prompt_inputs(folder: Path, messages: list[dict[str, Any]]) -> dict[str, Any]:
    processor = processed_vlms.reference_processor(folder)
    text = processor.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    return dict(processor(text=[text], add_special_tokens=False, return_tensors="pt"))


def sound_of(folder: Path, frames: list[list[int]]) -> np.ndarray:
    """Return the samples of frames that transformers decodes in one piece, as the wire has them."""
    with torch.inference_mode():
        samples = load_code2wav(folder)(torch.tensor(frames).T.unsqueeze(0))[0, 0]
    shaper = Shaper(24_000)
    pcm = shaper.push(samples.numpy()) + shaper.finish()
    return np.frombuffer(pcm, "<i2").astype(np.float32)


async def test_text_and_sound_are_those_of_the_model(checkpoint: tuple[Path, Any]) -> None:
    folder, model = checkpoint
    async with services(folder, VOICE) as run_by:
        await run_by.made.encoder()
        await run_by.thinker()
        talkers = [await run_by.talker(context=160)]
        await run_by.code2wav()
        inputs = prompt_inputs(folder, PROMPT)
        tokens, frames = omni.generated(model, inputs, TOKENS, FRAMES)
        reply = await run_by.answer(run_by.call())
        assert not reply.ended.lost
        assert reply.ids == tokens
        theirs = sound_of(folder, frames)
        ours = np.frombuffer(reply.pcm, "<i2").astype(np.float32)
        common = min(len(ours), len(theirs)) - 200  # each ends where its talker was stopped
        assert common > 2000
        assert np.abs(ours[:common] - theirs[:common]).max() <= 2

        talkers.append(await run_by.talker(context=160))

        answering = run_by.answer(run_by.call())
        moved, _ = await asyncio.gather(answering, run_by.kill_serving(talkers))
        assert not moved.ended.lost
        assert moved.text == reply.text
        assert len(moved.pcm) == len(reply.pcm)
        again = np.frombuffer(moved.pcm, "<i2").astype(np.float32)
        assert np.abs(again - ours).max() <= 1  # chunks of other sizes are rounded otherwise


async def test_pictures_and_sound_are_answered_aloud(checkpoint: tuple[Path, Any]) -> None:
    folder, _ = checkpoint
    async with services(folder, VOICE) as run_by:
        await run_by.made.encoder()
        await run_by.thinker()
        await run_by.talker(context=160)
        await run_by.code2wav()
        file = run_by.made.file(encoded(recording(0, 0.6), *EXACT["wav"]), is_audio=True)
        content = [{"type": "image"}, {"type": "text", "text": "What is "}, {"type": "audio"}]
        images = [*run_by.made.pictures(0), file]
        seen = await run_by.answer(run_by.call([{"role": "user", "content": content}], images))
        assert not seen.ended.lost
        assert len(seen.ids) == TOKENS
        assert seen.pcm
