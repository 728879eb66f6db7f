"""Serve HTTP on the connections of a descriptor store, without any service.

`python -m support.services.kept_worker SOCKET`

What it answers is a function of the request alone, but for the cuts between its batches: those are random, as in a
gateway, whose batches depend on who else is served.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
import uvloop

from motet_gateway.http.chunks import ChunkProtocol, State
from motet_gateway.http.connections.counts import ConnectionCounts
from motet_gateway.http.exchange import Exchange
from motet_gateway.kept import draws
from motet_gateway.kept.intake import Intake
from motet_pipelines.answers import Answers
from motet_shared.messages import Text

MAX_BODY = 1 << 26
_BATCHES = msgspec.msgpack.Decoder(list[Text])
_ENDS = msgspec.msgpack.Decoder(bool)


def word(seed: int, choice: int, number: int) -> str:
    """The text of a token: as long as it likes, and never the same twice."""
    return f"{seed}.{choice}.{number}:" + "x" * (random.Random(f"{seed}/{number}").randrange(40))


def plain(seed: int, size: int) -> bytes:
    """A body of `size` bytes."""
    return random.Random(seed).randbytes(size)


async def stream(http: Exchange, seed: int, tokens: int, choices: int, size: int) -> None:
    """Answer with events, a token each, of all choices; `size` bytes more in each event."""
    head = {"id": draws.token_hex(8), "created": draws.now(), "seed": draws.randbits(63)}

    async def source(request: int) -> AsyncGenerator[list[Text], None]:
        answers, at = Answers(request, _BATCHES, _ENDS), 0
        while (batch := await answers.recorded()) is not None:
            yield batch
            at += len(batch)
        if answers.end is not None:
            return
        while at < tokens:
            await asyncio.sleep(random.random() * 0.004)
            cut = min(random.randint(1, 3), tokens - at)
            batch = [Text(word(seed, request, at + i), [at + i]) for i in range(cut)]
            await answers.record(batch)
            yield batch
            at += cut
        await answers.finish(True)

    async def one(choice: int) -> None:
        async for batch in source(choice):
            events = [
                json.dumps({**head, "choice": choice, "text": item.text, "pad": "y" * size})
                for item in batch
            ]
            await http.write("".join(f"data: {event}\n\n" for event in events).encode())

    async with asyncio.TaskGroup() as group:
        for choice in range(choices):
            group.create_task(one(choice))
    await http.finish(b"data: [DONE]\n\n")


async def app(scope: Any, receive: Any, send: Any) -> None:
    http = Exchange(scope, receive, send)
    query = dict(pair.split("=") for pair in scope["query_string"].decode().split("&") if pair)
    numbers = {name: int(value) for name, value in query.items()}
    if scope["path"] == "/stream":
        await http.body(MAX_BODY)
        async with http.while_connected():
            await stream(http, **numbers)
    elif scope["path"] == "/plain":
        await asyncio.sleep(0.05)
        await http.reply(200, plain(**numbers))
    elif scope["path"] == "/unjournaled":
        for number in range(10_000):
            await http.write(b"%d\n" % number)
            await asyncio.sleep(0.005)
        await http.finish(b"")
    elif scope["path"] == "/die":
        os.abort()
    else:
        body = await http.body(MAX_BODY)
        await asyncio.sleep(0.05)
        await http.reply(200, hashlib.sha256(body).hexdigest().encode())


async def main(path: Path, most: int) -> None:
    """Serve the connections of a store, at most `most` at a time."""
    config = uvicorn.Config(app, http=ChunkProtocol, log_config=None, lifespan="off")
    config.load()
    state = State(counts=ConnectionCounts(most))
    intake = Intake(path, lambda: ChunkProtocol(config, state, {}))
    await intake.start()
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1]), int(sys.argv[2])))
