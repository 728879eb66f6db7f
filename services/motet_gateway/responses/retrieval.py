"""Serve what is stored: GET and DELETE /v1/responses/{id}, its input items, and its cancel."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from motet_gateway.context import GatewayContext
from motet_gateway.http.exchange import Exchange
from motet_gateway.http.fields import Strict
from motet_gateway.http.query import query_of
from motet_shared.errors import BadRequest, Unavailable

from .endpoints import NO_STORE
from .follow import follow
from .resource import OVER
from .schema import IMAGE_URLS, Includable
from .store import ResponseStore, StoredResponse


class RetrieveQuery(Strict):
    stream: bool = False
    starting_after: Annotated[int, Meta(ge=0)] | None = None
    include: list[Includable] = msgspec.field(default_factory=list)
    include_obfuscation: Literal["false"] = "false"


class ItemsQuery(Strict):
    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    include: list[Includable] = msgspec.field(default_factory=list)


async def get_response(service: GatewayContext, http: Exchange) -> None:
    """Answer a stored response; with `stream`, the events of one in the background."""
    query = query_of(http, RetrieveQuery, ("include",))
    if query.starting_after is not None and not query.stream:
        raise BadRequest("`starting_after` needs `stream=true`", param="starting_after")
    store, record = await _stored(service, http)
    if not query.stream:
        await http.reply(200, msgspec.json.encode(record.resource))
        return
    if record.body is None or not record.body.get("stream"):
        message = "`stream`: only responses that were created with `background` and `stream` can be streamed"
        raise BadRequest(f"{message}; leave it out", param="stream")
    after = -1 if query.starting_after is None else query.starting_after
    await follow(store, http, http.tenant.owner, record, after)


async def delete_response(service: GatewayContext, http: Exchange) -> None:
    """Delete a response with its input; one in the background ends."""
    store, record = await _stored(service, http)
    await store.delete(http.tenant.owner, record)
    answer = {"id": record.id, "object": "response", "deleted": True}
    await http.reply(200, msgspec.json.encode(answer))


async def delete_responses(service: GatewayContext, http: Exchange) -> None:
    """Delete all responses of the calling tenant: an extension."""
    await _store(service).documents.delete_all(http.tenant.owner)
    await http.reply(200, msgspec.json.encode({"object": "list", "deleted": True}))


async def cancel_response(service: GatewayContext, http: Exchange) -> None:
    """Cancel a response in the background; without effect on one that is over."""
    store, record = await _stored(service, http)
    if record.body is None:
        message = f"response {record.id!r} does not run in the background; close its connection"
        raise BadRequest(message)
    if record.status not in OVER:
        await store.stop(http.tenant.owner, record.id)
        record.resource["status"] = "cancelled"
    await http.reply(200, msgspec.json.encode(record.resource))


async def list_input_items(service: GatewayContext, http: Exchange) -> None:
    """Answer the input items of a response, a page at a time."""
    query = query_of(http, ItemsQuery, ("include",))
    store, record = await _stored(service, http)
    found = await store.input_items(http.tenant.owner, record.id)
    if query.order == "desc":
        found.reverse()
    if query.after is not None:
        ids = [item["id"] for item in found]
        if query.after not in ids:
            shown = query.after[:80]
            raise BadRequest(f"`after`: there is no item {shown!r}; leave it out", param="after")
        found = found[ids.index(query.after) + 1 :]
    page = found[: query.limit]
    if IMAGE_URLS not in query.include:
        _hide_images(page)
    answer = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(found) > len(page),
    }
    await http.reply(200, msgspec.json.encode(answer))


def _hide_images(items: list[dict[str, Any]]) -> None:
    """Leave out the images of messages, which may be large."""
    for item in items:
        content = item.get("content")
        for part in content if isinstance(content, list) else ():
            if part.get("type") == "input_image":
                part["image_url"] = None


# ------------------------------------------------------------------------------------------ helpers
def _store(service: GatewayContext) -> ResponseStore:
    if service.responses is None:
        raise Unavailable(NO_STORE)
    return service.responses


async def _stored(service: GatewayContext, http: Exchange) -> tuple[ResponseStore, StoredResponse]:
    """Return the store and the response that the path names.

    Raises NotFound if this tenant has no such response, Unavailable without a store.
    """
    store, owner = _store(service), http.tenant.owner
    record = await store.get(owner, http.scope["path_params"]["response_id"])
    is_running = record.body is not None and record.status not in OVER
    if is_running and await store.stop_of(owner, record.id) is not None:
        # The gateway that runs it has not noticed yet.
        record.resource["status"] = "cancelled"
    return store, record
