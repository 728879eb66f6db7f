"""Let a request or a session choose a target of its model's chain: the header `motet-target`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from motet_gateway.http.asgi import Scope, header
from motet_gateway.http.exchange import Exchange
from motet_shared.errors import BadRequest
from motet_shared.messages import Chat, Complete
from motet_shared.wire.discovery import Directory

HEADER = "motet-target"

R = TypeVar("R", Chat, Complete)


def pinned(http: Exchange, directory: Directory, requests: Sequence[R]) -> list[R]:
    """Return the requests with the target that the header names; without one, as they are.

    Such a request waits for its target, and fails with it: it goes to no other one. Raises BadRequest
    for a target that the model's chain does not have.
    """
    if not requests:
        return []
    name = target_of(http.scope, directory, requests[0].model)
    if not name:
        return list(requests)
    return [msgspec.structs.replace(request, target=name) for request in requests]


def target_of(scope: Scope, directory: Directory, model: str) -> str:
    """Return the target that the header names, "" without one. Raises BadRequest for an unknown one."""
    name = header(scope, HEADER.encode()).decode("latin-1").strip()
    if not name:
        return ""
    known = sorted(
        {
            card.target
            for beat in directory.instances("decode")
            for card in beat.models
            if card.name == model and card.target
        }
    )
    if name not in known:
        raise BadRequest(
            f"{HEADER}: {name[:64]!r} is no target of {model!r}; it has {', '.join(known) or 'none'}",
            param=HEADER,
        )
    return name
