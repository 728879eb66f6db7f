"""A conversation in which pocket-chat draws: the official client, a real nats-server, and real services."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from PIL import Image

from motet_diffusion.service import Diffusion
from motet_encoder.config import EncoderConfig
from motet_encoder.service import Encoder
from motet_llm.config import DecodeConfig
from motet_llm.service import Decode
from motet_shared.process.actor import Actor
from motet_shared.testing import NatsServer, running
from motet_tokenizer.config import TokenizerConfig
from motet_tokenizer.service import Tokenizer
from recipes.world.scenes import SHAPES
from support.checkpoints import diffusion_checkpoints
from support.checkpoints.diffusion_checkpoints import SIZE
from support.stages.diffusion_stage import MODEL as BRUSH
from support.stages.diffusion_stage import config
from support.stages.served_gateway import Served, served_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT = "pocket-chat"
FOLDER = Path(__file__).parents[3] / "models" / CHAT
ASKED = [{"role": "user", "content": "Draw two red circles."}]
TOOL: dict[str, Any] = {"type": "image_generation", "steps": 6}


@dataclass
class Studio(Served):
    actors: tuple[Actor, ...]
    painter: Diffusion

    async def idle(self) -> None:
        """Nothing is left behind, anywhere."""
        service = self.gateway.service
        assert service is not None
        async with asyncio.timeout(30):
            while (  # noqa: ASYNC110
                service.limits.active
                or self.painter.thread.engine.has_work
                or any(actor.bus.calls.active for actor in self.actors)
            ):
                await asyncio.sleep(0.01)
        for actor in self.actors:
            actor.check_integrity()
        assert (await service.uploads()).stats()["blobs"] == 0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Studio]:
    brush = diffusion_checkpoints.stable_diffusion(tmp_path_factory.mktemp("sd") / "model", "euler")
    async with NatsServer() as nats, served_gateway(nats) as gateway:
        decode = DecodeConfig(
            model=str(FOLDER), name=CHAT, threads=1, metrics_port=-1, num_blocks=200
        )
        tokenizer = TokenizerConfig(model=(f"{CHAT}={FOLDER}",))
        eyes = EncoderConfig(model=str(FOLDER), name=CHAT, threads=1, metrics_port=-1)
        async with (
            running(Decode(decode, await nats.bus("decode"))) as thinks,
            running(Tokenizer(tokenizer, await nats.bus("tokenizer"))) as talks,
            running(Diffusion(config(brush), await nats.bus("diffusion"))) as painter,
            running(Encoder(eyes, await nats.bus("encoder"))) as looks,
        ):
            assert isinstance(painter, Diffusion)
            roles = ("decode", "tokenizer", "diffusion", "encoder")
            await gateway.bus.directory.wait_for(lambda d: all(d.ready(role) for role in roles), 10)
            yield Studio(gateway, (thinks, talks, painter, looks), painter)


@pytest_asyncio.fixture(loop_scope="module")
async def studio(services: Studio) -> AsyncIterator[Studio]:
    services.painter.thread.engine.passes = 0
    yield services
    await services.idle()


def image(entry: dict[str, Any]) -> Image.Image:
    head, _, data = entry["image_url"]["url"].partition(",")
    found = Image.open(BytesIO(base64.b64decode(data)))
    assert head == f"data:image/{(found.format or '').lower()};base64"
    return found


async def ask(client: openai.AsyncOpenAI, **fields: Any) -> Any:
    body = {
        "model": CHAT,
        "messages": ASKED,
        "tools": [TOOL],
        "temperature": 0,
        "seed": 5,
        **fields,
    }
    return await client.chat.completions.create(**body)


async def test_a_response_draws(studio: Studio) -> None:
    tool: Any = {"type": "image_generation", "partial_images": 1}
    asked: Any = {"model": CHAT, "input": "Draw two red circles.", "temperature": 0}
    extra = {"tools": [{**tool, "steps": 6}], "seed": 5}
    async with studio.client() as client:
        events = await client.responses.create(**asked, stream=True, extra_body=extra)
        found = [event async for event in events]
    kinds = [event.type for event in found]
    assert "response.image_generation_call.partial_image" in kinds
    last = found[-1]
    assert last.type == "response.completed"
    (drawn,) = [item for item in last.response.output if item.type == "image_generation_call"]
    picture = Image.open(BytesIO(base64.b64decode(drawn.result or "")))
    assert picture.size == (SIZE, SIZE)
    assert (picture.format or "").lower() == drawn.output_format


async def refusal(client: openai.AsyncOpenAI, **fields: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        await ask(client, **fields)
    return caught.value


async def test_the_model_draws_and_says_what_it_sees(studio: Studio) -> None:
    async with studio.client() as client:
        reply = await ask(client)
        choice = reply.choices[0]
        assert choice.finish_reason == "stop"
        assert any(shape in choice.message.content for shape in SHAPES), (
            "what it sees: the brush is random"
        )
        assert choice.message.tool_calls is None
        (entry,) = choice.message.images
        assert (entry["type"], entry["index"], entry["revised_prompt"]) == (
            "image_url",
            0,
            "two red circles",
        )
        drawn = await client.images.generate(
            model=BRUSH, prompt="two red circles", extra_body={"seed": 5, "steps": 6}
        )
        assert drawn.data is not None
        assert entry["image_url"]["url"] == f"data:image/png;base64,{drawn.data[0].b64_json}"
        thought_twice = reply.usage.prompt_tokens
        plain = await ask(client, messages=[{"role": "user", "content": "Hello!"}])
        assert plain.usage.prompt_tokens * 2 < thought_twice
        assert not hasattr(plain.choices[0].message, "images")

        # As clients send it back: the picture is part of the conversation.
        history = [
            *ASKED,
            choice.message.model_dump(exclude_none=True),
            {"role": "user", "content": "Draw a blue star."},
        ]
        later = (await ask(client, messages=history)).choices[0].message
        assert later.images[0]["revised_prompt"] == "a blue star"
        other = await ask(client, tools=openai.NOT_GIVEN, modalities=["text", "image"])
        assert image(other.choices[0].message.images[0]).size == (SIZE, SIZE)
        two = await ask(client, n=2)
        assert [image(choice.message.images[0]).size for choice in two.choices] == [
            (SIZE, SIZE)
        ] * 2
        assert two.choices[0].message.images != two.choices[1].message.images


async def test_a_stream_has_the_picture_where_it_is_made(studio: Studio) -> None:
    tool = {**TOOL, "partial_images": 2, "progress": True, "output_format": "webp", "size": "64x32"}
    async with studio.client() as client:
        stream = await ask(
            client, tools=[tool], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        whole = (await ask(client, tools=[tool])).choices[0].message
    deltas = [
        chunk.choices[0].delta.model_dump(exclude_none=True) for chunk in chunks if chunk.choices
    ]
    kinds = [
        next((key for key in ("images", "partial_images", "image_progress") if key in delta), "")
        for delta in deltas
    ]
    assert kinds.count("images") == 1
    told = [delta["image_progress"]["step"] for delta in deltas if "image_progress" in delta]
    assert told == [1, 2, 3, 4, 5, 6]
    previews = [one for delta in deltas for one in delta.get("partial_images", [])]
    assert [(one["index"], one["partial_image_index"]) for one in previews] == [(0, 0), (0, 1)]
    (entry,) = deltas[kinds.index("images")]["images"]
    assert [image(one).size for one in (*previews, entry)] == [(64, 32)] * 3
    assert entry == whole.images[0]
    assert max(index for index, kind in enumerate(kinds) if kind == "partial_images") < kinds.index(
        "images"
    )
    before = "".join(delta.get("content", "") for delta in deltas[: kinds.index("images")])
    after = "".join(delta.get("content", "") for delta in deltas[kinds.index("images") :])
    assert (before, after) == ("", whole.content)
    assert chunks[-1].usage.completion_tokens > 10


@pytest.mark.parametrize(
    ("fields", "status", "param", "message"),
    [
        (
            {"tools": [{**TOOL, "model": "nobody"}]},
            404,
            "tools[0].model",
            "is no diffusion model here",
        ),
        ({"tools": [{**TOOL, "size": "big"}]}, 400, "tools[0].size", "'big'"),
        ({"tools": [{**TOOL, "size": "30000x30000"}]}, 413, "tools[0].size", "is more than"),
        ({"tools": [{**TOOL, "steps": 0}]}, 400, "tools[0].steps", ">= 1"),
        ({"tools": [{**TOOL, "partial_images": 9}]}, 400, "tools[0].partial_images", "<= 8"),
        ({"tools": [{**TOOL, "background": "transparent"}]}, 400, "tools[0].background", "opaque"),
        (
            {"tools": [{**TOOL, "quality": "hd"}]},
            400,
            "tools[0].quality",
            "`steps`",
        ),
        (
            {"tools": [{**TOOL, "input_fidelity": "high"}]},
            400,
            "tools[0].input_fidelity",
            "unknown parameter",
        ),
        ({"tools": [TOOL, TOOL]}, 400, "tools[1]", "`image_generation`"),
        (
            {"tools": [{"type": "function", "function": {"name": "draw"}}, TOOL]},
            400,
            "tools[0].function.name",
            "`tools[0].function.name`",
        ),
        ({"tool_choice": {"type": "image_generation"}}, 400, "tool_choice", "is not supported"),
        ({"modalities": ["image"]}, 400, "modalities", "is not supported"),
    ],
)
async def test_refusals(
    studio: Studio, fields: dict[str, Any], status: int, param: str, message: str
) -> None:
    async with studio.client() as client:
        error = await refusal(client, **fields)
    assert (error.status_code, error.param) == (status, param)
    assert message in error.message


async def test_a_tool_that_is_turned_off_draws_nothing(studio: Studio) -> None:
    async with studio.client() as client:
        message = (await ask(client, tool_choice="none")).choices[0].message
    assert not hasattr(message, "images")
    assert not studio.painter.thread.engine.passes


@pytest.mark.parametrize("phase", ["thinking", "drawing"])
async def test_a_client_that_leaves_stops_it(studio: Studio, phase: str) -> None:
    async with studio.client() as client:
        tool = {**TOOL, "steps": 2000, "progress": True}
        stream = await ask(client, tools=[tool], stream=True)
        if phase == "drawing":
            async for chunk in stream:
                if "image_progress" in chunk.choices[0].delta.model_dump():
                    break
        await stream.close()
        await studio.idle()
    assert studio.painter.thread.engine.passes < 1500
