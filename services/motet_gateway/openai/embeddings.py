"""Serve POST /v1/embeddings: embed texts, token ids or pictures.

Vectors are returned as numbers or as base64 of little-endian float32.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Literal

import msgspec
import numpy as np

from motet_gateway.context import GatewayContext
from motet_gateway.embeddings.input import EmbeddingInput, InputMessage, InputPart, read_input
from motet_gateway.http.decoding import Decoder
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.fields import Count, Positive, Strict
from motet_gateway.operations.loading import check_wait
from motet_gateway.tenancy.usage import PICTURE_TOKENS, settled, text_tokens
from motet_pipelines.embed import ROLE, Embedded, embed
from motet_shared.errors import BadRequest
from motet_shared.messages import Embed, Vectors

from .aliases import model_of
from .chat_images import leased_images
from .prompt_size import PromptSize, read_prompt


class EmbeddingsBody(Strict):
    """Body of POST /v1/embeddings: OpenAI's fields, parts with pictures, and `prompt_name`.

    `prompt_name` selects the model's prompt that is put before each text.
    """

    model: str
    input: str | list[str | Count | list[Count] | InputPart] | None = None
    messages: list[InputMessage] | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Positive | None = None
    user: str | None = None
    prompt_name: str | None = None


_decoder = Decoder(EmbeddingsBody)


async def embeddings(service: GatewayContext, http: Exchange) -> None:
    """Answer with all vectors at once, in the order of the input."""
    body = _decoder.decode(
        await read_prompt(service, http, "input", role=ROLE, ids=service.config.max_body),
        http.hints("embeddings"),
    )
    given = read_input(body.input, body.messages, service.config.max_inputs)
    service.check_open()
    request = Embed(
        model=model_of(service.bus.directory, ROLE, body.model),
        input=given.texts,
        prompt=body.prompt_name or "",
        dimensions=body.dimensions or 0,
        request_id=http.request_id,
        priority=http.tenant.rights.priority(None),
    )

    def answer(parts: list[Vectors], tokens: int) -> bytes:
        return _answer(body.encoding_format, request.model, parts, given.order, tokens)

    await http.reply(200, await embedded(service, http, request, answer, given))


async def embedded(
    service: GatewayContext,
    http: Exchange,
    request: Embed,
    render: Callable[[list[Vectors], int], bytes],
    given: EmbeddingInput,
    param: str = "input",
) -> bytes:
    """Embed texts and pictures, charge them, and return what `render` makes of the vectors.

    render: takes the vectors and the number of tokens, on a thread. given: the input of `request`.
    param: of the texts, for errors.
    """
    directory = service.bus.directory
    check_wait(http, directory, ROLE, request.model)
    size = PromptSize.of(directory, ROLE, request.model, http.tenant)
    for text in given.texts:
        size.check_text(text, param)
    outcome = Embedded()
    expected = sum(
        text_tokens(text) if isinstance(text, str) else len(text) for text in given.texts
    )
    expected += PICTURE_TOKENS * len(given.pictures)
    with await http.tenant.take(tokens=expected) as ticket:
        async with http.while_connected():
            with settled(ticket.tokens, expected, lambda: outcome.tokens):
                parts = await _vectors(service, request, given, outcome)
            # Rendering megabytes of digits would block the event loop.
            return await asyncio.to_thread(render, parts, outcome.tokens)


async def _vectors(
    service: GatewayContext, request: Embed, given: EmbeddingInput, outcome: Embedded
) -> list[Vectors]:
    """Return the vectors of the texts, then of the pictures, which are lent meanwhile."""
    files, config = await given.files(service), service.config
    async with await leased_images(service, files) as request.pictures:
        vectors = embed(
            service.bus,
            request,
            outcome,
            deadline=config.request_timeout,
            patience=config.patience,
        )
        async with aclosing(vectors):
            return [part async for part in vectors]


def _answer(
    encoding: str, model: str, parts: list[Vectors], order: list[int], tokens: int
) -> bytes:
    entries = [entry for part in parts for entry in _entries(part, encoding)]
    data = [
        {"object": "embedding", "index": index, **entries[place]}
        for index, place in enumerate(order)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return msgspec.json.encode({"object": "list", "data": data, "model": model, "usage": usage})


def _entries(part: Vectors, encoding: str) -> list[dict[str, Any]]:
    """Return what the answer has of each text: its vector, or a list of the vectors of its tokens."""
    found = np.frombuffer(part.data, "<f4")
    if part.size:
        rows = found.reshape(-1, part.size)
        return [{"embeddings": [_numbers(row, encoding) for row in rows]}]
    return [{"embedding": _numbers(row, encoding)} for row in found.reshape(part.count, -1)]


def rows_of(parts: list[Vectors]) -> list[np.ndarray[Any, np.dtype[np.float32]]]:
    """Return one vector per text.

    Raises BadRequest if the model has a vector for each token.
    """
    if any(part.size for part in parts):
        raise BadRequest(
            "`model` has a vector for each token; POST /v1/embeddings returns those", param="model"
        )
    return [
        row for part in parts for row in np.frombuffer(part.data, "<f4").reshape(part.count, -1)
    ]


def _numbers(row: np.ndarray[Any, np.dtype[np.float32]], encoding: str) -> str | list[float]:
    found: str | list[float] = (
        base64.b64encode(row.tobytes()).decode() if encoding == "base64" else row.tolist()
    )
    return found
