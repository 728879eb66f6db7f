"""Serve POST /v1/rerank, /rerank and /v2/rerank: order documents by their relevance for a query.

Bodies are Cohere's and Jina's; the answer has the fields of both.
"""

from __future__ import annotations

import uuid
from typing import Any

import msgspec

from motet_gateway.context import GatewayContext
from motet_gateway.http.decoding import Decoder
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.fields import Positive, Strict
from motet_gateway.http.json_size import MAX_ENTRIES
from motet_gateway.openai.prompt_size import read_prompt
from motet_pipelines.rank import ROLE
from motet_shared.errors import BadRequest
from motet_shared.messages import Rank

from .scoring import score, served_model

Document = str | dict[str, Any]


class RerankBody(Strict):
    """Body of POST /v1/rerank.

    A document is a text or an object with `text`; `rank_fields` names other fields of objects that
    are read, in this order. `max_tokens_per_doc` cuts longer documents, which are refused otherwise.
    """

    query: str
    documents: list[str | dict[str, Any]]
    model: str | None = None
    top_n: Positive | None = None
    return_documents: bool | None = None
    rank_fields: list[str] | None = None
    max_tokens_per_doc: Positive | None = None
    user: str | None = None


_decoder = Decoder(RerankBody)


async def rerank(service: GatewayContext, http: Exchange) -> None:
    """Answer the documents' scores, the best first, with their texts unless these are not wanted.

    Jina and vLLM return documents by default; clients of Cohere's first version ignore them.
    """
    await _rerank(service, http, documents=True)


async def rerank_v2(service: GatewayContext, http: Exchange) -> None:
    """Answer as Cohere's second version: without documents unless these are wanted."""
    await _rerank(service, http, documents=False)


async def _rerank(service: GatewayContext, http: Exchange, *, documents: bool) -> None:
    body = _decoder.decode(
        await read_prompt(service, http, "documents", role=ROLE, entries=MAX_ENTRIES),
        http.hints("rerank"),
    )
    if not body.documents:
        raise BadRequest("`documents` is empty; give texts", param="documents")
    request = Rank(
        model=served_model(service, body.model),
        queries=[body.query],
        documents=[_text(one, index, body.rank_fields) for index, one in enumerate(body.documents)],
        max_document=body.max_tokens_per_doc or 0,
        request_id=http.request_id,
    )
    scores, tokens = await score(service, http, request)
    shown = documents if body.return_documents is None else body.return_documents
    await http.reply(200, _answer(body, request.model, scores, tokens, shown=shown))


def _text(document: Document, index: int, fields: list[str] | None) -> str:
    """Return what is read of a document. Raises BadRequest for an object without such a text."""
    if isinstance(document, str):
        return document
    names = fields or ["text"]
    found = [(name, document.get(name)) for name in names]
    if missing := [name for name, value in found if not isinstance(value, str)]:
        raise BadRequest(
            f"`documents[{index}]` has no text in {missing[0]!r}; give an object with `text`, or name "
            "its fields in `rank_fields`",
            param=f"documents[{index}].{missing[0]}",
        )
    if fields is None:
        return str(found[0][1])
    return "\n".join(f"{name}: {value}" for name, value in found)


def _answer(
    body: RerankBody, model: str, scores: list[float], tokens: int, *, shown: bool
) -> bytes:
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": _shown(body.documents[index])} if shown else {})
        for index in order[: body.top_n]
    ]
    return msgspec.json.encode(
        {
            "id": str(uuid.uuid4()),
            "model": model,
            "results": results,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "meta": {"tokens": {"input_tokens": tokens}},
        }
    )


def _shown(document: Document) -> dict[str, Any]:
    return {"text": document} if isinstance(document, str) else document
