"""Serve POST /v1/score and /score: the scores of pairs of texts, as vLLM has them."""

from __future__ import annotations

import re
import time
import uuid

import msgspec

from motet_gateway.context import GatewayContext
from motet_gateway.http.decoding import Decoder
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.fields import Strict
from motet_gateway.http.json_size import MAX_ENTRIES
from motet_gateway.openai.param_names import ParamNames
from motet_gateway.openai.prompt_size import read_prompt
from motet_pipelines.rank import ROLE
from motet_shared.errors import BadRequest
from motet_shared.messages import Rank

from .scoring import score, served_model


class ScoreBody(Strict):
    """Body of POST /v1/score: one text, or one for each, against one or many others."""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    user: str | None = None


_decoder = Decoder(ScoreBody)
_NAMES = ParamNames(
    patterns=(
        (re.compile(r"\bdocuments(?=\[|`|$)"), "text_2"),
        (re.compile(r"\bquery(?=`|$)"), "text_1"),
    )
)


async def score_pairs(service: GatewayContext, http: Exchange) -> None:
    """Answer POST /v1/score: the scores of all pairs, in the order of the texts."""
    body = _decoder.decode(
        await read_prompt(service, http, "text_2", role=ROLE, entries=MAX_ENTRIES),
        http.hints("score"),
    )
    queries, documents = _listed(body.text_1), _listed(body.text_2)
    if not documents:
        raise BadRequest("`text_2` is empty; give a text, or a list of texts", param="text_2")
    if len(queries) not in (1, len(documents)):
        message = f"`text_1` has {len(queries)} texts for {len(documents)} of `text_2`; give one, "
        raise BadRequest(message + "or one for each", param="text_1")
    request = Rank(
        model=served_model(service, body.model),
        queries=queries,
        documents=documents,
        request_id=http.request_id,
    )
    with _NAMES.applied():
        scores, tokens = await score(service, http, request)
    answer = {
        "id": f"score-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": request.model,
        "data": [
            {"index": index, "object": "score", "score": one} for index, one in enumerate(scores)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    await http.reply(200, msgspec.json.encode(answer))


def _listed(given: str | list[str]) -> list[str]:
    return [given] if isinstance(given, str) else given
