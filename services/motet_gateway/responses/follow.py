"""Stream the events of a response that runs, or ran, in the background, from any event on."""

from __future__ import annotations

import asyncio
from typing import Any

from motet_gateway.http.exchange import Exchange
from motet_gateway.http.problems import NotFound

from .foreground import add_end, add_opening
from .output.events import Events
from .output.output import Output
from .resource import OVER, Resource
from .schema import ENCRYPTED, LOGPROBS
from .store import ResponseStore, StoredResponse
from .tools import offered

_POLL = 0.2  # seconds between two looks for more


async def follow(
    store: ResponseStore, http: Exchange, owner: str, record: StoredResponse, after: int = -1
) -> None:
    """Send the events of a response beyond number `after`, until it ends.

    They are made of its log, which has what the model wrote: any gateway sends the same events,
    whichever one runs the response. A client that leaves does not end the response.
    """
    events = Events()
    output = Output(record.id, events, **_options(record))
    add_opening(events, _queued(record.resource))
    part = 0
    async with http.while_connected():
        await http.write(events.take(after))
        while True:
            is_over = record.status in OVER
            while (texts := await store.log(owner, record.id, part)) is not None:
                output.add(texts)
                part += 1
                await http.write(events.take(after))
            if is_over:
                break
            await asyncio.sleep(_POLL)
            try:
                record = await store.get(owner, record.id)
            except NotFound:  # it was deleted
                record.resource["status"] = "cancelled"
        output.finish("completed" if record.status == "completed" else "incomplete")
        add_end(events, record.resource)
        await http.finish(events.take(after))


def _queued(resource: Resource) -> Resource:
    """Return a response as it was when it was taken in."""
    later = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
    return {**resource, "status": "queued", "output": [], **later}


def _options(record: StoredResponse) -> dict[str, Any]:
    body = record.asked
    return {
        "custom": offered(body.tools or [], body.tool_choice).custom,
        "logprobs": LOGPROBS in body.included,
        "encrypted": ENCRYPTED in body.included,
    }
