"""Kill -9 of gateways and decode workers under a session that sees: its answers are those of an undisturbed one."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from PIL import Image

from e2e.stack import MotetStack
from recipes.world.pictures import draw
from recipes.world.scenes import sample_scene
from support.clients.realtime_client import talking
from support.stages.shipped_stack import MODELS

pytestmark = [pytest.mark.long, pytest.mark.timeout(400), pytest.mark.slow]

MODEL = "pocket-chat"
VIDEO = {"type": "merged", "frames": 2, "groups": 2, "group_size": 3}
QUESTIONS = ("What do you see?", "How many things are there?", "Describe the picture.", "And now?")
FRAMES = 5  # between two questions


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotetStack]:
    folder = tmp_path_factory.mktemp("eyes")
    models = ("--llm", str(MODELS / MODEL), "--asr", "none", "--tts", "none", "--vad", "0")
    options = ("--decode", "2", "--no-store", "--keep-connections")
    with MotetStack(folder, *models, *options) as made:
        made.wait_until_all_ready()
        yield made


def frame(number: int) -> str:
    rng = Random(number // 3)
    file = io.BytesIO()
    Image.fromarray(draw(sample_scene(rng, min_things=1), rng)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


async def looked(stack: MotetStack, *killed: str) -> list[tuple[str, Any]]:
    """Return text and prompt tokens of each answer; `killed` dies during each question but the first."""
    url = stack.url.replace("http://", "ws://") + f"/v1/realtime?model={MODEL}"
    settings: dict[str, Any] = {
        "temperature": 0,
        "max_output_tokens": 40,
        "output_modalities": ["text"],
    }
    answers = []
    async with talking(url, **settings, video=VIDEO) as client:
        for number, question in enumerate(QUESTIONS):
            for shown in range(FRAMES):
                image = frame(number * FRAMES + shown)
                await client.send("input_image_buffer.append", image=image)
            content = [{"type": "input_text", "text": question}]
            item = {"type": "message", "role": "user", "content": content}
            await client.send("conversation.item.create", item=item)
            await client.send("response.create")
            await client.until("response.created")
            returned = [stack.kill(name) for name in killed if number]
            done = (await client.until("response.done"))[-1]["response"]
            assert done["status"] in ("completed", "incomplete")
            answers.append((done["output"][0]["content"][0]["text"], done["usage"]["input_tokens"]))
            for wait in returned:
                await asyncio.to_thread(wait)
    return answers


@pytest.mark.parametrize("killed", ["gateway", "decode-1", "encoder"])
async def test_a_session_that_sees_moves_with_the_same_answers(
    stack: MotetStack, killed: str
) -> None:
    undisturbed = await looked(stack)
    assert all(text for text, _ in undisturbed)
    assert await looked(stack, killed) == undisturbed
    await asyncio.to_thread(stack.wait_until_all_ready)
