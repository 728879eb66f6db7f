"""Every family that hears: prompts and greedy tokens are those of transformers' processor and `generate`.

With one recording, with several, and with none, in chunks that cut recordings. One family is in
`make test`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from motet_models.image_support import HEARING_TYPES, MODEL_TYPES
from motet_shared.errors import UnsupportedParameter
from support.checkpoints.vlm_checkpoints import picture
from support.families import hearing
from support.families.encoded_chats import World
from support.families.hearing import RATE, recording
from support.running.refusals import refuses
from support.running.tiers import mostly_long

LENGTHS = [1.0, 0.7, 1.6]  # seconds
# Granite Speech pads the recordings of a prompt to the longest, which its tower hears.
EVEN_LENGTHS = [1.0, 1.0, 1.6]


def inputs_of(processor: Any, parts: Sequence[int | str]) -> dict[str, Any]:
    lengths = EVEN_LENGTHS if hasattr(processor, "audio_processor") else LENGTHS
    heard = [recording(part, lengths[part]) for part in parts if isinstance(part, int)]
    text = "".join(processor.audio_token if isinstance(part, int) else part for part in parts)
    sound = {"audio": heard} if heard else {}
    options = {"add_special_tokens": False, "return_tensors": "pt"}
    return dict(processor(text=[text], **sound, **options))


def voxtral_inputs_of(processor: Any, parts: Sequence[int | str]) -> dict[str, Any]:
    """Return what `VoxtralProcessor.apply_chat_template` makes of recordings.

    The method itself needs mistral-common, which gives each stretch of 30 s as many tokens.
    """
    heard = [recording(part, LENGTHS[part]) for part in parts if isinstance(part, int)]
    ids: list[int] = []
    for part in parts:
        more = [hearing.VOXTRAL_TOKEN] * hearing.VOXTRAL_TOKENS
        ids += more if isinstance(part, int) else list(part.encode())
    inputs = {"input_ids": torch.tensor([ids])}
    if heard:
        options = {"sampling_rate": RATE, "padding": True, "truncation": False}
        inputs["input_features"] = type(processor)._retrieve_input_features(
            processor, heard, 3000, pad_to_multiple_of=480_000, return_tensors="pt", **options
        )
    return inputs


@pytest.mark.parametrize("name", mostly_long(hearing.FAMILIES, ["qwen2_audio"]))
def test_sound_is_heard_as_by_transformers(name: str, tmp_path: Path) -> None:
    lengths = EVEN_LENGTHS if name == "granite_speech" else LENGTHS
    world = World(
        name,
        hearing.FAMILIES[name],
        tmp_path,
        [recording(number, seconds) for number, seconds in enumerate(lengths)],
        lambda family, one: family.prepare_sound(one, RATE),
        voxtral_inputs_of if name == "voxtral" else inputs_of,
    )
    # GLM-ASR's processor takes one recording.
    more: list[int | str] = [] if name == "glmasr" else [" and in ", 1]
    world.compare(
        [
            world.talk("What is said in ", 0, *more, "?"),
            world.talk(2, "Tell me."),
            world.talk("No sound at all."),
        ]
    )
    together = world.family.encode([world.prepared[0]] * 2)
    for one in together:
        torch.testing.assert_close(one, world.images[0].embeddings_LTX, atol=1e-5, rtol=1e-5)
    if name in MODEL_TYPES:  # it sees, too
        return
    with refuses(UnsupportedParameter, None):
        world.family.prepare(picture(0), 0)


def test_no_other_family_is_served_with_sound() -> None:
    assert set(hearing.FAMILIES) == HEARING_TYPES
