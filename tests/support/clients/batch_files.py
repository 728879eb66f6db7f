"""Write the input files of batches, and wait until a batch is over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import openai

from support.services.fake_services import MODEL

CHAT = "/v1/chat/completions"


def chat_line(custom_id: str, text: str, **fields: Any) -> dict[str, Any]:
    """Return a line that asks the fake model, which repeats the text."""
    message = {"role": "user", "content": text}
    body = {"model": MODEL, "messages": [message], **fields}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def jsonl(lines: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def begin(
    client: openai.AsyncOpenAI, data: bytes, endpoint: str = CHAT, **fields: Any
) -> openai.types.Batch:
    """Upload a file and create the batch of it."""
    file = await client.files.create(file=("in.jsonl", data), purpose="batch")
    options: Any = {"endpoint": endpoint, "completion_window": "24h"} | fields
    return await client.batches.create(input_file_id=file.id, **options)


async def over(
    client: openai.AsyncOpenAI, batch_id: str, seconds: float = 60
) -> openai.types.Batch:
    """Return a batch once it is over."""
    async with asyncio.timeout(seconds):
        while True:
            found = await client.batches.retrieve(batch_id)
            if found.status in ("completed", "failed", "expired", "cancelled"):
                return found
            await asyncio.sleep(0.05)


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> list[Any]:
    """Return the lines of a result file, none if there is no file."""
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [json.loads(line) for line in content.content.splitlines()]


def text_of(line: Any) -> str:
    """Return the text of a chat's answer."""
    text: str = line["response"]["body"]["choices"][0]["message"]["content"]
    return text
