"""Chats with pictures at other engines: the engine of one stack is the gateway of another, and ours follows it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from motet_engines.config import EnginesConfig
from motet_engines.service import EngineHost
from motet_gateway.config import GatewayConfig
from motet_gateway.service import Gateway
from motet_shared.errors import BadRequest, Overloaded, PayloadTooLarge, UnsupportedParameter
from motet_shared.messages import Chat, Complete, Image, PromptPiece, Sampling, Tokenize
from motet_shared.testing import die, memory_bus
from motet_tokenizer.service import Tokenizer
from support.checkpoints.vlm_checkpoints import tiny_vlm
from support.media.videos import random_video
from support.peers.scripted_openai import OpenAIServer
from support.running.refusals import refuses
from support.stages.vlm_stage import MODEL, Reply, Stage, stage

QUESTION = [
    {"type": "text", "text": "Compare "},
    {"type": "image"},
    {"type": "text", "text": " with "},
    {"type": "image"},
    {"type": "text", "text": "."},
]
ONE = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
TOKENS = 9  # of a picture


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vlm("llava_clip", tmp_path_factory.mktemp("llava"))


@dataclass
class World:
    """Hold a stack with a gateway, and a stack of which that is the engine."""

    back: Stage
    front: Stage
    url: str

    async def host(self, url: str = "", **settings: Any) -> EngineHost:
        config = EnginesConfig(
            engine="openai",
            model=str(self.front.folder),
            name=MODEL,
            engine_url=url or self.url,
            metrics_port=-1,
            **settings,
        )
        host: EngineHost = await self.front.start(
            EngineHost(config, await memory_bus(self.front.hub, "decode"))
        )
        return host


@asynccontextmanager
async def world_of(folder: Path, **settings: Any) -> AsyncIterator[World]:
    """Run both stacks; settings: of the tokenizer in front."""
    async with stage(folder) as back, stage(folder) as front:
        await back.encoder()
        await back.decode()
        await back.tokenizer()
        gateway = Gateway(
            GatewayConfig(port=0, drain_timeout=1.0), await memory_bus(back.hub, "gateway")
        )
        await back.start(gateway)
        await front.tokenizer(**settings)
        yield World(back, front, f"http://127.0.0.1:{gateway.port}/v1")


def messages(content: Any = ONE) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def counts(reply: Reply) -> dict[str, int]:
    """Return the usage of a reply, but for what a cache had."""
    usage = reply.end.usage
    assert usage is not None
    return {
        name: getattr(usage, name)
        for name in ("prompt_tokens", "completion_tokens", "image_tokens")
    }


async def in_mid_reply(stage: Stage, **asked: Any) -> asyncio.Task[Any]:
    """Ask for a long reply; return when some of its tokens have come."""
    (tokenizer,) = (one for one in stage.actors if isinstance(one, Tokenizer))
    before = tokenizer.counters.tokens
    asking = asyncio.create_task(stage.ask(ONE, stage.pictures(1), max_tokens=200, **asked))
    async with asyncio.timeout(60):
        while tokenizer.counters.tokens < before + 3:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    return asking


def kill(stage: Stage, actor: Any) -> None:
    stage.actors.remove(actor)
    die(actor.bus)
    for one in stage.actors:
        one.bus.directory.suspect(actor.bus.instance)


async def test_the_reply_is_that_of_the_engine(folder: Path) -> None:
    """No encoder is beside the host, and the usage counts the engine's tokens."""
    async with world_of(folder) as world:
        host = await world.host()
        (card,) = host.models()
        assert (card.takes_images, card.refuses_images, card.takes_chats) == (True, False, False)
        theirs = await world.back.ask(QUESTION, world.back.pictures(1, 2))
        ours = await world.front.ask(QUESTION, world.front.pictures(1, 2))
        assert ours.ids == theirs.ids
        assert counts(ours) == counts(theirs)
        assert counts(ours)["image_tokens"] == 2 * TOKENS
        other = await world.front.ask(QUESTION, world.front.pictures(2, 1))
        assert other.ids != ours.ids


async def test_a_resolution_reaches_the_engine(tmp_path: Path) -> None:
    async with world_of(tiny_vlm("qwen2_5_vl", tmp_path)) as world:
        await world.host()
        small = {"max_pixels": 28 * 28}
        theirs = await world.back.ask(ONE, world.back.pictures(1, **small))
        ours = await world.front.ask(ONE, world.front.pictures(1, **small))
        large = await world.front.ask(ONE, world.front.pictures(1))
        assert ours.ids == theirs.ids
        assert counts(ours) == counts(theirs)
        assert counts(large)["image_tokens"] > counts(ours)["image_tokens"]


async def test_a_reply_goes_on_at_our_engine(folder: Path) -> None:
    """Its pictures are encoded only then, and nothing is repeated or lost."""
    async with world_of(folder) as world:
        host = await world.host(target="theirs")
        encoder = await world.front.encoder()
        await world.front.decode(target="ours", rank=1)
        whole = await world.back.ask(ONE, world.back.pictures(1), max_tokens=200)
        asking = await in_mid_reply(world.front)
        assert encoder.stats()["pictures"] == 0
        kill(world.front, host)
        reply = await asking
        assert reply.ids == whole.ids
        assert encoder.stats()["pictures"] == 1
        assert counts(reply) == counts(whole)


async def test_a_reply_of_ours_does_not_go_on_at_a_server_of_chats(folder: Path) -> None:
    """Its chats leave no place for what was sent; a new reply is served there."""
    async with world_of(folder) as world:
        await world.host(target="theirs", rank=1)
        await world.front.encoder()
        decode = await world.front.decode(target="ours")
        asking = await in_mid_reply(world.front)
        kill(world.front, decode)
        with refuses(Overloaded, None):
            await asking
        assert (await world.front.ask(ONE, world.front.pictures(1))).ids


async def test_a_target_without_pictures_is_passed_over(folder: Path) -> None:
    server = OpenAIServer([120], [chr(number) for number in range(300)])
    server.refuses_pictures = True
    with server.serving():
        async with world_of(folder) as world:
            host = await world.host(server.base, target="blind")
            assert host.models()[0].refuses_images
            with refuses(UnsupportedParameter, "image"):
                await world.front.ask(ONE, world.front.pictures(1, param="image"))
            await world.host(target="theirs", rank=1)
            theirs = await world.back.ask(ONE, world.back.pictures(1))
            assert (await world.front.ask(ONE, world.front.pictures(1))).ids == theirs.ids


async def test_a_moved_reply_waits_for_a_target_that_sees(folder: Path) -> None:
    """The only one that is up takes no pictures; what was sent is not given up for that."""
    server = OpenAIServer([120], [chr(number) for number in range(300)])
    server.refuses_pictures = True
    with server.serving():
        async with world_of(folder, decode_wait=60.0) as world:
            host = await world.host(target="theirs")
            await world.host(server.base, target="blind", rank=1)
            await world.front.encoder()
            whole = await world.back.ask(ONE, world.back.pictures(1), max_tokens=200)
            asking = await in_mid_reply(world.front)
            kill(world.front, host)
            await asyncio.sleep(0.2)
            await world.front.decode(target="ours", rank=2)
            assert (await asking).ids == whole.ids


async def test_refusals_name_what_is_wrong(folder: Path) -> None:
    async with world_of(folder) as world:
        await world.host(image_memory=20_000)
        front = world.front
        with refuses(UnsupportedParameter, "video"):
            await front.ask(ONE, [front.file(random_video(10), is_video=True, param="video")])
        with refuses(BadRequest, "image"):
            await front.ask(ONE, [front.file(b"junk", param="image")])
        with refuses(BadRequest, "messages"):
            await front.ask(QUESTION, front.pictures(1))
        with refuses(PayloadTooLarge, "messages"):
            await front.ask(ONE, [front.file(bytes(20_001), param="image")])
        with refuses(UnsupportedParameter, "prompt_logprobs"):
            await front.ask(ONE, front.pictures(1), sampling_fields={"prompt_logprobs": 0})
        chat = Chat(model=MODEL, messages=messages(), sampling=Sampling(), images=images(front))
        with refuses(UnsupportedParameter, "messages"):
            await tokens_of(front, chat)
        assert await tokens_of(world.back, msgspec.structs.replace(chat, images=images(world.back)))


def images(stage: Stage) -> list[Image]:
    return stage.pictures(1)


async def tokens_of(stage: Stage, chat: Chat) -> int:
    """Return how many tokens a chat has, as `/tokenize` counts them."""
    async with stage.gateway.open("tokenizer", Tokenize(prompt=chat, count_only=True)) as stream:
        async for _ in stream:
            pass
    assert stream.end is not None
    assert stream.end.usage is not None
    return stream.end.usage.prompt_tokens


async def test_log_probabilities_of_a_prompt_are_those_of_the_engine(folder: Path) -> None:
    async with world_of(folder) as world:
        await world.host()
        theirs, ours = [await scores(one) for one in (world.back, world.front)]
        assert len(ours) == len(theirs) > 5
        for one, due in zip(ours[1:], theirs[1:], strict=True):
            assert one.token == due.token
            assert one.logprob == pytest.approx(due.logprob, abs=1e-4)
            assert one.rank == due.rank
            assert len(one.top) == len(due.top) == 2


async def scores(stage: Stage) -> list[Any]:
    """Return the scores of a prompt, all tokens in order."""
    sampling = Sampling(temperature=0, prompt_logprobs=2)
    asked = Complete(model=MODEL, prompt="Red and blue.", sampling=sampling, max_tokens=2)
    found: list[Any] = []
    async with stage.gateway.open("tokenizer", asked) as stream:
        async for item in stream:
            if isinstance(item, PromptPiece):
                found += item.logprobs or []
    return found
