"""Probe a server before a run: its models, and the tokens per word of its tokenizer."""

from __future__ import annotations

import asyncio
from random import Random

import msgspec

from motet_cli.bench import words
from motet_cli.bench.exchange import exchange
from motet_cli.bench.http import BadResponse, Client
from motet_cli.bench.request import PATHS, Request, Shape
from motet_cli.bench.results.record import Record
from motet_cli.bench.tokens_per_word import TokensPerWord
from motet_shared.errors import MotetError, Unavailable, UnknownModel

_SHORT, _LONG = 8, 72  # words of the two prompts


async def pick_model(client: Client, url: str, wanted: str | None, kind: str = "chat") -> str:
    """Return the model to measure: `wanted`, or else the first of its kind that the server lists.

    Servers that do not tell kinds list models of any.
    `wanted` is not checked if the server lists no models. Raises Unavailable if the server does not
    answer or lists none, UnknownModel with the served names if `wanted` is not among them.
    """
    served = await _served(client, url, kind)
    if wanted is not None:
        if served and wanted not in served:
            raise UnknownModel(
                f"--model: {wanted!r} is not served by {url}; choose one of {', '.join(served)}",
                param="--model",
            )
        return wanted
    if not served:
        raise Unavailable(f"{url} lists no model yet; wait until it is ready, or give --model NAME")
    return served[0]


async def _served(client: Client, url: str, kind: str) -> list[str]:
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
        raise MotetError(f"{url} requires a key (status {reply.status}); give --api-key-file PATH")
    try:
        found = msgspec.json.decode(body)["data"]
        return [str(model["id"]) for model in found if model.get("kind", kind) == kind]
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return []


async def measure_tokens_per_word(
    client: Client, shape: Shape, timeout: float
) -> TokensPerWord | None:
    """Measure tokens per word with two requests; None if the server reports no usage.

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
    return TokensPerWord.fit(*observed)
