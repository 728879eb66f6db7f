"""Describe chat models as Anthropic's GET /v1/models does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from msgspec import Meta

from motet_gateway.http.asgi import Scope, header
from motet_gateway.http.fields import Strict
from motet_gateway.http.problems import ErrorFormat
from motet_shared.errors import BadRequest

from .errors import ERRORS

LISTS = ("lifecycle",)  # parameters of the query that may be repeated
_VERSION = b"anthropic-version"  # of the protocol; Anthropic's clients send it with each request
_CHAT = "chat"


class ModelsQuery(Strict):
    """The query of a list; `beta` is sent by clients and has no effect."""

    limit: Annotated[int, Meta(ge=1, le=1000)] = 20
    after_id: str | None = None
    before_id: str | None = None
    lifecycle: list[Literal["active", "deprecated", "retired"]] | None = None
    beta: bool | None = None


def is_asked(scope: Scope) -> bool:
    """Return True if a request is one of Anthropic's clients."""
    return bool(header(scope, _VERSION))


def error_format(scope: Scope) -> ErrorFormat | None:
    """Return Anthropic's format of errors for its clients, None for others."""
    return ERRORS if is_asked(scope) else None


def models_page(models: Sequence[Mapping[str, Any]], query: ModelsQuery) -> dict[str, Any]:
    """Return a page of the chat models among `models`, which are described in OpenAI's format.

    Raises BadRequest for a cursor that is none of them.
    """
    known = [found for model in models if (found := model_info(model)) is not None]
    if query.lifecycle is not None and "active" not in query.lifecycle:
        known = []
    ids = [model["id"] for model in known]
    if query.after_id is not None and query.before_id is not None:
        message = "`before_id`: give either `after_id` or `before_id`"
        raise BadRequest(message, param="before_id")
    if query.before_id is not None:
        before = known[: _place(ids, "before_id", query.before_id)]
        page, more = before[-query.limit :], len(before) > query.limit
    else:
        after = query.after_id
        rest = known if after is None else known[_place(ids, "after_id", after) + 1 :]
        page, more = rest[: query.limit], len(rest) > query.limit
    return {
        "data": page,
        "has_more": more,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }


def model_info(model: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a model in Anthropic's format; None if it is no chat model."""
    if model["kind"] != _CHAT:
        return None
    context = model.get("context_length")
    return {
        "type": "model",
        "id": model["id"],
        "display_name": model["id"],
        "created_at": f"{datetime.fromtimestamp(model['created'], UTC):%Y-%m-%dT%H:%M:%SZ}",
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
        "capabilities": None,
        "line": None,
        "deprecated_at": None,
        "retires_at": None,
    }


def _place(ids: Sequence[str], name: str, cursor: str) -> int:
    if cursor not in ids:
        raise BadRequest(f"`{name}`: there is no model {cursor[:80]!r}; leave it out", param=name)
    return ids.index(cursor)
