"""Odd, broken and absurd pictures through HTTP: in a chat that sees, and as pictures to be changed."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from motet_diffusion.service import Diffusion
from motet_encoder.config import EncoderConfig
from motet_encoder.service import Encoder
from motet_llm.config import DecodeConfig
from motet_llm.service import Decode
from motet_shared.testing import NatsServer, running
from motet_tokenizer.config import TokenizerConfig
from motet_tokenizer.service import Tokenizer
from support.checkpoints import diffusion_checkpoints
from support.checkpoints.vlm_checkpoints import tiny_vlm
from support.media.picture_files import encoded, odd_kinds, pattern, unreadable_kinds
from support.stages.diffusion_stage import MODEL as BRUSH
from support.stages.diffusion_stage import config
from support.stages.served_gateway import KEY, Served, served_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "eyes"
ODD, UNREADABLE = odd_kinds(), unreadable_kinds()
PLAIN = encoded(pattern(64, 48))
TOKEN = 28 * 28  # pixels that the model sees as one token


@dataclass
class Services(Served):
    painter: Diffusion
    decode: Decode


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    brush = diffusion_checkpoints.stable_diffusion(tmp_path_factory.mktemp("sd") / "model", "euler")
    eyes = str(tiny_vlm("qwen2_5_vl", tmp_path_factory.mktemp("eyes") / MODEL))
    small: dict[str, Any] = {"model": eyes, "name": MODEL, "threads": 1, "metrics_port": -1}
    async with (
        NatsServer() as nats,
        served_gateway(nats, image_pixels=4 * TOKEN) as gateway,
        running(Encoder(EncoderConfig(**small, cache_memory=4 << 20), await nats.bus("encoder"))),
        running(
            Decode(DecodeConfig(**small, num_blocks=200, block_size=8), await nats.bus("decode"))
        ) as decode,
        running(
            Tokenizer(TokenizerConfig(model=(f"{MODEL}={eyes}",)), await nats.bus("tokenizer"))
        ),
        running(Diffusion(config(brush), await nats.bus("diffusion"))) as painter,
    ):
        assert isinstance(painter, Diffusion)
        assert isinstance(decode, Decode)
        roles = ("encoder", "decode", "tokenizer", "diffusion")
        await gateway.bus.directory.wait_for(lambda d: all(d.ready(role) for role in roles), 10)
        yield Services(gateway, painter, decode)


@pytest_asyncio.fixture(loop_scope="module")
async def client(services: Services) -> AsyncIterator[openai.AsyncOpenAI]:
    async with services.client() as client:
        yield client


async def seen(client: openai.AsyncOpenAI, data: bytes) -> list[tuple[list[int], float]]:
    """What the model says of a picture, token by token."""
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    content: Any = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What is it?"},
    ]
    reply = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=6,
        logprobs=True,
        extra_body={"ignore_eos": True},
    )
    assert reply.choices[0].logprobs is not None
    tokens = reply.choices[0].logprobs.content or []
    return [(token.bytes or [], round(token.logprob, 4)) for token in tokens]


async def changed(client: openai.AsyncOpenAI, image: bytes, **fields: Any) -> str:
    """The picture that becomes of one, as base64."""
    ours = {"seed": 5, "steps": 4, "strength": 0.5, **fields.pop("extra_body", {})}
    body: dict[str, Any] = {
        "model": BRUSH,
        "prompt": "x",
        "image": ("a.png", image),
        **fields,
        "extra_body": ours,
    }
    return (await client.images.edit(**body)).data[0].b64_json


@pytest.mark.parametrize("kind", ODD)
async def test_odd_pictures_are_what_they_show(client: openai.AsyncOpenAI, kind: str) -> None:
    odd, plain = ODD[kind]
    assert await seen(client, odd) == await seen(client, plain)
    assert await changed(client, odd) == await changed(client, plain)


@pytest.mark.parametrize("kind", ["animated", "16-bit", "CMYK"])
async def test_odd_masks_are_what_they_show(client: openai.AsyncOpenAI, kind: str) -> None:
    odd, plain = [("m.png", data) for data in ODD[kind]]
    assert await changed(client, PLAIN, mask=odd) == await changed(client, PLAIN, mask=plain)


async def test_detail_decides_how_many_tokens_a_picture_costs(client: openai.AsyncOpenAI) -> None:
    url = "data:image/png;base64," + base64.b64encode(encoded(pattern(280, 280))).decode()

    async def tokens(**options: Any) -> int:
        messages: Any = [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": url, **options}}],
            }
        ]
        reply = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
        assert reply.usage is not None
        details = reply.usage.prompt_tokens_details
        assert details is not None
        return details.image_tokens or 0

    assert await tokens() == await tokens(detail="auto") == 4  # the server's --image-pixels
    assert (
        await tokens(detail="high") == await tokens(detail="low") == 16
    )  # all that the model takes
    assert await tokens(max_pixels=9 * TOKEN) == 9


@pytest.mark.parametrize("kind", UNREADABLE)
async def test_unreadable_pictures_are_refused_by_name(
    services: Services, client: openai.AsyncOpenAI, kind: str
) -> None:
    data, status = UNREADABLE[kind]
    passes = services.painter.thread.engine.passes
    for request, param in (
        (partial(seen, client, data), "messages[0].content[0].image_url"),
        (partial(changed, client, data), "image"),
        (partial(changed, client, PLAIN, mask=("m.png", data)), "mask"),
    ):
        with pytest.raises(openai.APIStatusError) as caught:
            await request()
        assert (caught.value.status_code, caught.value.param) == (status, param)
    assert services.painter.thread.engine.passes == passes
    services.painter.check_integrity()
    services.decode.check_integrity()


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"size": "99999x99999"}, 413, "size"),
        ({"size": "0x16"}, 400, "size"),
        ({"size": "-16x16"}, 400, "size"),
        ({"size": "1x1"}, 400, "size"),
        ({"size": 512}, 400, "size"),
        ({"n": 0}, 400, "n"),
        ({"n": 10**9}, 400, "n"),
        ({"n": "many"}, 400, "n"),
        ({"n": 1.5}, 400, "n"),
        ({"steps": 0}, 400, "steps"),
        ({"steps": 99_999}, 400, "steps"),
        ({"steps": 10**30}, 400, "steps"),
        ({"steps": -1}, 400, "steps"),
        ({"guidance_scale": 1e300}, 400, "guidance_scale"),
        ({"seed": 2**64}, 400, "seed"),
        ({"partial_images": 10**6, "stream": True}, 400, "partial_images"),
        ({"output_compression": 101}, 400, "output_compression"),
        ({"prompt": ["a", "b"]}, 400, "prompt"),
        ({"prompt": "x" * 300_000}, 413, "prompt"),
    ],
)
async def test_absurd_numbers(
    services: Services, fields: dict[str, Any], status: int, param: str
) -> None:
    body = {"model": BRUSH, "prompt": "x", **fields}
    headers = {"authorization": f"Bearer {KEY}"}
    passes = services.painter.thread.engine.passes
    async with httpx.AsyncClient(trust_env=False, headers=headers, timeout=60) as http:
        reply = await http.post(f"{services.url}/v1/images/generations", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), reply.text
    assert services.painter.thread.engine.passes == passes


async def test_one_bad_request_among_others_spoils_none(client: openai.AsyncOpenAI) -> None:
    alone = await changed(client, PLAIN)
    bad = [changed(client, data) for data, *_ in UNREADABLE.values()]
    together = await asyncio.gather(
        changed(client, PLAIN), *bad, changed(client, PLAIN), return_exceptions=True
    )
    assert [together[0], together[-1]] == [alone, alone]
    assert all(isinstance(found, openai.APIStatusError) for found in together[1:-1])
