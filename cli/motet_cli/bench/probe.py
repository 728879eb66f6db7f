"""Check before a run that the server has the model, and measure what words cost in its tokens."""

from __future__ import annotations

import asyncio
from random import Random

import msgspec

from motet_cli.bench import words
from motet_cli.bench.exchange import exchange
from motet_cli.bench.http import BadResponse, Client
from motet_cli.bench.request import PATHS, Request, Shape
from motet_cli.bench.results.record import Record
from motet_cli.bench.scale import Scale
from motet_shared.errors import MotetError, Unavailable, UnknownModel

_SHORT, _LONG = 8, 72  # words


async def pick_model(client: Client, url: str, wanted: str | None) -> str:
    """Return the model to measure. `wanted` is trusted if the server lists no models.

    Raises Unavailable if the server does not answer or lists no model, UnknownModel with the names
    that are served.
    """
    served = await _served(client, url)
    if wanted is not None:
        if served and wanted not in served:
            raise UnknownModel(
                f"--model: {wanted!r} is not served by {url}; choose one of {', '.join(served)}"
            )
        return wanted
    if not served:
        raise Unavailable(f"{url} lists no model yet; wait until it is ready, or give --model NAME")
    return served[0]


async def _served(client: Client, url: str) -> list[str]:
    try:
        async with asyncio.timeout(10):
            reply = await client.request("GET", "/models")
            body = await reply.read()
    except TimeoutError:
        raise Unavailable(f"{url} does not answer within 10 s") from None
    except (OSError, BadResponse) as error:
        raise Unavailable(
            f"no server answers at {url} ({error}); start one with `motet up`, or give its URL"
        ) from None
    reply.close()
    if reply.status in (401, 403):
        raise MotetError(
            f"{url} wants a key (it answered {reply.status}); give --api-key-file PATH"
        )
    try:
        return [str(model["id"]) for model in msgspec.json.decode(body)["data"]]
    except (msgspec.DecodeError, KeyError, TypeError):
        return []


async def measure_scale(client: Client, shape: Shape, timeout: float) -> Scale | None:
    """Return what a word costs in tokens, from two requests' usage; None if it is not reported.

    Raises MotetError with the server's message if it refuses them: no other request would succeed.
    """
    observed = []
    for count in (_SHORT, _LONG):
        record = Record(0, 0.0)
        request = Request(0.0, words.draw(Random(f"scale/{count}"), count), 1)
        clock = asyncio.get_running_loop().time
        await exchange(client, PATHS[shape.endpoint], shape.body(request), record, clock, timeout)
        if not record.ok:
            raise MotetError(
                f"the server refuses the first request ({record.error}): {record.message}"
            )
        if not record.prompt_tokens:
            return None
        observed.append((count, record.prompt_tokens))
    return Scale.fit(*observed)
