"""Run a gateway in memory with a response store; the official client's types check its events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from motet_gateway.responses.store import ResponseStore
from motet_shared.messages import Text
from support.clients.gateway_client import Http, World, world
from support.services.fake_services import tool_call
from support.services.memory_documents import MemoryDocuments

PATH = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Look outside.",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
}
_EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


class Responses:
    """Send requests to /v1/responses, as one tenant after another."""

    def __init__(self, made: World, documents: MemoryDocuments):
        self.made, self.documents = made, documents

    @property
    def requests(self) -> list[Any]:
        """Return the requests that the tokenizer received."""
        return self.made.tokenizer.requests

    def says(self, *items: Text) -> None:
        """Let the model answer with these items from now on."""
        self.made.tokenizer.reply = lambda request: list(items)

    def calls(self, arguments: str, name: str = "weather") -> None:
        """Let the model call a tool from now on."""
        self.says(tool_call(arguments, name))

    def ask(self, given: Any = "hello", **fields: Any) -> Http:
        headers = fields.pop("headers", None)
        body = {"model": "pocket-fake", "input": given} | fields
        body = {name: value for name, value in body.items() if value is not ...}
        return self.made.ask(PATH, headers=headers, **body)

    async def create(self, given: Any = "hello", **fields: Any) -> dict[str, Any]:
        """Return a complete response, checked by the official client's types."""
        http = await self.ask(given, **fields).done()
        assert http.status == 200, http.body
        Response.model_validate(http.json(), strict=True)
        found: dict[str, Any] = http.json()
        return found

    async def stream(self, given: Any = "hello", **fields: Any) -> list[dict[str, Any]]:
        """Return the events of a response, checked by `events_of`."""
        http = await self.ask(given, stream=True, **fields).done()
        assert http.status == 200, http.body
        return events_of(http.body)

    async def refused(self, given: Any = "hello", **fields: Any) -> tuple[int, str, str | None]:
        """Return status, code and parameter of a refusal."""
        return problem(await self.ask(given, **fields).done())

    async def get(self, path: str, method: str = "GET", **headers: str) -> Http:
        url, _, query = path.partition("?")
        http = Http(self.made.app, f"{PATH}/{url}", b"", method, headers or None, query=query)
        return await http.done()


def problem(http: Http) -> tuple[int, str, str | None]:
    error = http.json()["error"]
    return http.status, error["code"], error["param"]


def events_of(body: bytes, first: int = 0) -> list[dict[str, Any]]:
    """Return the events of a stream after checking their numbers, from `first`, and their types."""
    events = []
    for block in body.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        _EVENTS.validate_python(event, strict=True)
        events.append(event)
    assert [event["sequence_number"] for event in events] == [
        first + number for number in range(len(events))
    ]
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


@asynccontextmanager
async def responses(**settings: Any) -> AsyncIterator[Responses]:
    documents = MemoryDocuments()
    async with world(patience=0.2, **settings) as made:
        made.service.responses = ResponseStore(documents, made.service.stored)
        yield Responses(made, documents)
        await made.service.close()
