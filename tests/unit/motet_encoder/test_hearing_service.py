"""Chats with recordings through encoder, tokenizer and decode: exact, cached by content, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from motet_media.sound_file import read_audio
from motet_shared.errors import BadRequest, UnsupportedParameter
from motet_shared.messages import Image
from support.checkpoints.vlm_checkpoints import picture
from support.families import hearing, processed_vlms
from support.families.hearing import recording
from support.media.sound_files import EXACT, LOSSY, encoded
from support.running.refusals import refuses
from support.stages.vlm_stage import Stage, png, stage

NAME = "qwen2_audio"
TIE = 1e-4
TWO = [
    {"type": "text", "text": "Compare "},
    {"type": "audio"},
    {"type": "text", "text": " with "},
    {"type": "audio"},
    {"type": "text", "text": "."},
]


def files() -> list[bytes]:
    return [
        encoded(recording(0), *EXACT["wav"]),
        encoded(recording(1, 0.6), *LOSSY["mp3"]),
    ]


def heard(made: Stage, data: bytes) -> Image:
    return made.file(data, is_audio=True, param="sound")


@torch.inference_mode()
def expected(folder: Path, model: Any, count: int) -> list[set[int]]:
    """Return the tokens of `transformers.generate`, each with those that tie with it."""
    processor = processed_vlms.reference_processor(folder)
    messages = [{"role": "user", "content": TWO}]
    text = processor.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    sounds = [read_audio(data, 60.0) for data in files()]
    inputs = processor(text=[text], audio=sounds, add_special_tokens=False, return_tensors="pt")
    made = model.generate(
        **inputs,
        max_new_tokens=count,
        eos_token_id=1 << 20,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return [set((one[0] > one[0].max() - TIE).nonzero().flatten().tolist()) for one in made.logits]


async def test_recordings_are_heard_cached_and_refused(tmp_path: Path) -> None:
    model = processed_vlms.write_family(NAME, hearing.FAMILIES[NAME], tmp_path)
    async with stage(tmp_path) as made:
        encoder = await made.encoder(max_sound=2.0)
        await made.decode()
        tokenizer = await made.tokenizer()
        assert tokenizer.models()[0].audio
        assert not tokenizer.models()[0].images
        reply = await made.ask(TWO, [heard(made, data) for data in files()])
        for token, likely in zip(reply.ids, expected(tmp_path, model, len(reply.ids)), strict=True):
            assert token in likely
            if len(likely) > 1:
                break
        usage = reply.end.usage
        assert usage is not None
        assert (usage.audio_tokens, usage.image_tokens) == (25 + 15, 0)
        again = await made.ask(TWO, [heard(made, data) for data in files()])
        assert again.ids == reply.ids
        assert encoder.stats()["cache_hits"] == 2
        for data in (b"no sound at all", encoded(recording(0, 3.0), *EXACT["wav"])):
            with refuses(BadRequest, "sound"):
                await made.see(heard(made, data))
        with refuses(UnsupportedParameter, "image"):
            await made.see(made.file(png(picture(0)), param="image"))
        with refuses(UnsupportedParameter, "messages[0].content[0].type"):
            await made.ask([{"type": "image"}], [])


async def test_a_model_that_only_sees_refuses_sound(tmp_path: Path) -> None:
    processed_vlms.write("internvl", tmp_path)
    async with stage(tmp_path) as made:
        await made.encoder()
        with refuses(UnsupportedParameter, "sound"):
            await made.see(heard(made, files()[0]))


def test_silence_of_no_length_is_no_recording() -> None:
    with pytest.raises(BadRequest):
        read_audio(b"", 1.0)
