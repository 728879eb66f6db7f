"""Serve POST /api/embed and POST /api/embeddings."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import msgspec
import numpy as np

from motet_gateway.context import GatewayContext
from motet_gateway.embeddings.input import EmbeddingInput
from motet_gateway.http.exchange import Exchange
from motet_gateway.openai.embeddings import embedded, rows_of
from motet_gateway.openai.prompt_size import read_prompt
from motet_pipelines.embed import ROLE
from motet_shared.errors import BadRequest
from motet_shared.messages import Embed, Vectors

from .names import model_in
from .reply_lines import nanoseconds
from .residency import keep
from .schema import parse_embed, parse_prompt


async def embed(service: GatewayContext, http: Exchange) -> None:
    """Answer with a vector of unit length for each text."""
    began = perf_counter()
    data = await read_prompt(service, http, "input", role=ROLE)
    body = parse_embed(data, http.hints("ollama"))
    texts = [body.input] if isinstance(body.input, str) else body.input
    _check_count(len(texts), service.config.max_inputs)
    model = _admit(service, http, body.model, body.keep_alive)

    def render(parts: list[Vectors], tokens: int) -> bytes:
        counts = {"total_duration": nanoseconds(perf_counter() - began), "load_duration": 0}
        vectors = [_unit(row) for row in rows_of(parts)]
        answer = {"model": model, "embeddings": vectors, **counts, "prompt_eval_count": tokens}
        return msgspec.json.encode(answer)

    if not texts:
        await http.reply(200, render([], 0))
        return
    request = _request(http, model, list(texts))
    request.dimensions = body.dimensions or 0
    given = EmbeddingInput(request.input)
    await http.reply(200, await embedded(service, http, request, render, given))


async def embed_prompt(service: GatewayContext, http: Exchange) -> None:
    """Answer with the vector of one text, as its model makes it."""
    data = await read_prompt(service, http, "prompt", role=ROLE)
    body = parse_prompt(data, http.hints("ollama"))
    model = _admit(service, http, body.model, body.keep_alive)
    request = _request(http, model, [body.prompt])

    def render(parts: list[Vectors], tokens: int) -> bytes:
        (row,) = rows_of(parts)
        return msgspec.json.encode({"embedding": row.tolist()})

    given = EmbeddingInput(request.input)
    await http.reply(200, await embedded(service, http, request, render, given, "prompt"))


def _request(http: Exchange, model: str, texts: list[str | list[int]]) -> Embed:
    priority = http.tenant.rights.priority(None)
    return Embed(model=model, input=texts, request_id=http.request_id, priority=priority)


def _admit(
    service: GatewayContext, http: Exchange, name: str, keep_alive: float | str | None
) -> str:
    service.check_open()
    model = model_in(service, ROLE, name)
    keep(service, http, model, keep_alive, ROLE)
    return model


def _check_count(count: int, most: int) -> None:
    if count > most:
        message = f"`input` has {count} texts; at most {most} are taken at a time (--max-inputs)"
        raise BadRequest(message, param="input")


def _unit(row: np.ndarray[Any, np.dtype[np.float32]]) -> list[float]:
    """Return a vector of length 1; one of zeros as it is."""
    length = float(np.linalg.norm(row))
    found: list[float] = (row / length if length else row).tolist()
    return found
