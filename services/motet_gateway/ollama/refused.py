"""Refuse by name what only changes a library of models: create, copy, delete, push and blobs."""

from __future__ import annotations

from motet_gateway.context import GatewayContext
from motet_gateway.http.exchange import Exchange
from motet_shared.errors import BadRequest

_REMEDIES = {
    "create": "give `motet up --llm` a checkpoint folder",
    "copy": "name a model with `motet up --llm NAME=MODEL`",
    "delete": "use `motet remove`",
    "push": "upload it with the hub's own tools",
    "blobs": "give `motet up --llm` a checkpoint folder",
}


class UnsupportedOperation(BadRequest):
    code = "unsupported_operation"


async def refuse(service: GatewayContext, http: Exchange) -> None:
    """Raise UnsupportedOperation, which names the operation and what to do instead."""
    name = http.scope["path"].split("/")[2]
    raise UnsupportedOperation(f"/api/{name} is not supported; {_REMEDIES[name]}")
