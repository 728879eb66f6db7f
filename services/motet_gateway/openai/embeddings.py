"""Serve POST /v1/embeddings: embed texts or token ids.

Vectors are returned as numbers or as base64 of little-endian float32.
"""

from __future__ import annotations

import asyncio
import base64
from contextlib import aclosing
from typing import Any, Literal

import msgspec
import numpy as np

from motet_gateway.context import GatewayContext
from motet_gateway.http.decoding import Decoder
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.fields import Count, Positive, Strict
from motet_gateway.operations.loading import check_wait
from motet_gateway.tenancy.usage import settled, text_tokens
from motet_pipelines.embed import ROLE, Embedded, embed
from motet_shared.errors import BadRequest
from motet_shared.messages import Embed, Vectors

from .aliases import model_of
from .prompt_size import PromptSize, read_prompt


class EmbeddingsBody(Strict):
    """Body of POST /v1/embeddings: OpenAI's fields and the extension `prompt_name`.

    `prompt_name` selects the model's prompt that is put before each text.
    """

    model: str
    input: str | list[str | Count | list[Count]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Positive | None = None
    user: str | None = None
    prompt_name: str | None = None


_decoder = Decoder(EmbeddingsBody)


async def embeddings(service: GatewayContext, http: Exchange) -> None:
    """Answer with all vectors at once, in the order of the texts."""
    body = _decoder.decode(
        await read_prompt(service, http, "input", role=ROLE, ids=service.config.max_body),
        http.hints("embeddings"),
    )
    texts = _texts(body.input, service.config.max_inputs)
    service.check_open()
    request = Embed(
        model=model_of(service.bus.directory, ROLE, body.model),
        input=texts,
        prompt=body.prompt_name or "",
        dimensions=body.dimensions or 0,
        request_id=http.request_id,
        priority=http.tenant.rights.priority(None),
    )
    check_wait(http, service.bus.directory, ROLE, request.model)
    size = PromptSize.of(service.bus.directory, ROLE, request.model, http.tenant)
    for text in texts:
        size.check_text(text, "input")
    outcome, parts = Embedded(), []
    expected = sum(text_tokens(text) if isinstance(text, str) else len(text) for text in texts)
    with http.tenant.take(tokens=expected) as ticket:
        async with http.while_connected():
            settings = service.config
            vectors = embed(
                service.bus,
                request,
                outcome,
                deadline=settings.request_timeout,
                patience=settings.patience,
            )
            with settled(ticket.tokens, expected, lambda: outcome.tokens):
                async with aclosing(vectors):
                    async for part in vectors:
                        parts.append(part)
            # Rendering megabytes of digits would block the event loop.
            answer = await asyncio.to_thread(
                _answer, body.encoding_format, request.model, parts, outcome.tokens
            )
    await http.reply(200, answer)


def _texts(given: str | list[str | int | list[int]], most: int) -> list[str | list[int]]:
    """Return one entry per text: a string or a list of token ids.

    Raises BadRequest if `given` is empty, mixes token ids with texts, or has more than `most`
    texts.
    """
    if isinstance(given, str):
        return [given]
    if not given:
        raise BadRequest("`input` is empty; give a text, or a list of texts", param="input")
    numbers = [entry for entry in given if isinstance(entry, int)]
    if numbers:
        if len(numbers) < len(given):
            raise BadRequest("`input` mixes token ids with texts; give either", param="input")
        return [numbers]
    if len(given) > most:
        message = (
            f"`input` has {len(given)} texts; at most {most} are taken at a time (--max-inputs)"
        )
        raise BadRequest(message, param="input")
    return [entry for entry in given if not isinstance(entry, int)]


def _answer(encoding: str, model: str, parts: list[Vectors], tokens: int) -> bytes:
    rows = [
        row for part in parts for row in np.frombuffer(part.data, "<f4").reshape(part.count, -1)
    ]
    data: list[dict[str, Any]] = [
        {"object": "embedding", "index": index, "embedding": _numbers(row, encoding)}
        for index, row in enumerate(rows)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return msgspec.json.encode({"object": "list", "data": data, "model": model, "usage": usage})


def _numbers(row: np.ndarray[Any, np.dtype[np.float32]], encoding: str) -> str | list[float]:
    found: str | list[float] = (
        base64.b64encode(row.tobytes()).decode() if encoding == "base64" else row.tolist()
    )
    return found
