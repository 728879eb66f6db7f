"""`input_audio` parts: read in the order of all parts, kept as parts for the template, and refused."""

from __future__ import annotations

import base64
import json
from types import SimpleNamespace
from typing import Any

import pytest

from motet_gateway.openai.chat_images import read_images
from motet_gateway.openai.requests import wire_messages
from motet_gateway.openai.schema import ChatBody, parse_chat
from motet_shared.errors import BadRequest, MotetError, PayloadTooLarge, UnsupportedParameter
from motet_shared.messages import ModelCard
from support.running.refusals import refuses

SOUND = b"RIFF and so on"
DATA = base64.b64encode(SOUND).decode()
WHERE = "messages[0].content[1].input_audio"


def body(audio: Any, role: str = "user") -> ChatBody:
    parts = [{"type": "text", "text": "Listen:"}, {"type": "input_audio", "input_audio": audio}]
    messages = [{"role": role, "content": parts}]
    return parse_chat(json.dumps({"model": "ears", "messages": messages}).encode())


def service(*, audio: bool = False) -> Any:
    card = ModelCard(name="ears", context=100, images=not audio, audio=audio)
    beat = SimpleNamespace(models=[card])
    directory = SimpleNamespace(base_of=str, ready=lambda _: [beat])
    return SimpleNamespace(
        bus=SimpleNamespace(directory=directory), config=SimpleNamespace(max_upload=len(SOUND))
    )


async def test_a_recording_is_read_and_its_place_kept() -> None:
    asked = body({"data": DATA, "format": "wav"})
    (medium,) = await read_images(service(audio=True), asked, accepts_images=False)
    assert (medium.data, medium.is_audio, medium.param) == (SOUND, True, WHERE)
    assert wire_messages(asked.messages)[0]["content"] == [
        {"type": "text", "text": "Listen:"},
        {"type": "audio"},
    ]


@pytest.mark.parametrize(
    ("audio", "hears", "error", "param"),
    [
        ({"data": DATA, "format": "wav"}, False, UnsupportedParameter, WHERE),
        ({"data": "not base64!", "format": "wav"}, True, BadRequest, f"{WHERE}.data"),
        ({"data": "", "format": "mp3"}, True, BadRequest, f"{WHERE}.data"),
        ({"data": DATA * 2, "format": "mp3"}, True, PayloadTooLarge, f"{WHERE}.data"),
    ],
)
async def test_what_is_no_recording_is_refused(
    audio: dict[str, str], hears: bool, error: type[MotetError], param: str
) -> None:
    with refuses(error, param):
        await read_images(service(audio=hears), body(audio), accepts_images=True)


def test_other_formats_and_other_roles_are_refused() -> None:
    with refuses(BadRequest, f"{WHERE}.format"):
        body({"data": DATA, "format": "ogg"})
    with refuses(UnsupportedParameter, "messages[0].content[1]"):
        wire_messages(body({"data": DATA, "format": "wav"}, role="system").messages)
