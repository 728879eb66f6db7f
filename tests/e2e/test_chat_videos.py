"""A conversation about videos through the official client, over the whole stack."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from e2e.stack import MotetStack
from support.checkpoints.vlm_checkpoints import picture, tiny_vlm
from support.media.videos import random_video
from support.stages.vlm_stage import png

pytestmark = [pytest.mark.long, pytest.mark.timeout(300), pytest.mark.slow]

MODEL = "tiny-qwen"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder: Path = tiny_vlm("qwen2_5_vl", tmp_path_factory.mktemp("models") / MODEL)
    nothing = [part for name in ("asr", "tts") for part in (f"--{name}", "none")]
    with MotetStack(
        tmp_path_factory.mktemp("stack"), "--llm", str(folder), "--vad", "0", *nothing
    ) as stack:
        stack.wait_until_all_ready()
        with openai.OpenAI(
            base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60
        ) as client:
            yield client


def part(kind: str, media: str, data: bytes, **options: Any) -> dict[str, Any]:
    url = f"data:{media};base64," + base64.b64encode(data).decode()
    return {"type": kind, kind: {"url": url, **options}}


def shown(data: bytes, **options: Any) -> dict[str, Any]:
    return part("video_url", "video/mp4", data, **options)


def answer(client: openai.OpenAI, *parts: Any, **options: Any) -> Any:
    content = [*parts, {"type": "text", "text": "What happens?"}]
    return client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=8,
        logprobs=True,
        **options,
    )


def logprobs(reply: Any) -> list[float]:
    return [entry.logprob for entry in reply.choices[0].logprobs.content]


def test_a_video_is_seen_and_counted(client: openai.OpenAI) -> None:
    short, long = answer(client, shown(random_video(4))), answer(client, shown(random_video(40)))
    tokens = [reply.usage.prompt_tokens_details.image_tokens for reply in (short, long)]
    assert 0 < tokens[0] < tokens[1]
    assert logprobs(short) != logprobs(long)
    again = answer(client, shown(random_video(40)))
    assert again.choices[0].message.content == long.choices[0].message.content
    assert again.usage.prompt_tokens_details.image_tokens == tokens[1]


def test_a_video_beside_an_image_in_a_stream(client: openai.OpenAI) -> None:
    image = part("image_url", "image/png", png(picture(1)))
    whole = answer(client, image, shown(random_video(8)))
    with answer(
        client, image, shown(random_video(8)), stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == whole.choices[0].message.content
    assert (
        chunks[-1].usage.prompt_tokens_details.image_tokens
        == whole.usage.prompt_tokens_details.image_tokens
    )
    assert (
        whole.usage.prompt_tokens_details.image_tokens
        > answer(client, shown(random_video(8))).usage.prompt_tokens_details.image_tokens
    )


@pytest.mark.parametrize(
    ("video", "param"),
    [
        (shown(random_video(8)[:900]), "messages[0].content[0].video_url"),
        (shown(b"no film"), "messages[0].content[0].video_url"),
        (part("video_url", "image/png", png(picture(1))), "messages[0].content[0].video_url.url"),
    ],
)
def test_invalid_videos_are_rejected(client: openai.OpenAI, video: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        answer(client, video)
    assert caught.value.code == "invalid_request"
    assert caught.value.param == param
