"""Define how a request is put to a server and how its reply is read: one route per kind of endpoint."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from motet_engines.engine import Features, StepOutput
from motet_engines.pictures import Picture
from motet_shared.errors import Unavailable
from motet_shared.messages import Generate

from .failures import of_event

# Finish reasons of replies that are not finished: of vLLM, SGLang and TensorRT-LLM.
_BROKEN_OFF = ("abort", "error", "cancelled", "timeout")


class Event(Protocol):
    """Hold what one event of a server says, or its error."""

    error: Any


E = TypeVar("E", bound=Event)


class Reply(Protocol):
    """Read the events of one reply."""

    def feed(self, data: bytes) -> StepOutput | None:
        """Return the tokens of an event; None for one without. Raises MotetError."""
        ...

    def end(self) -> StepOutput:
        """Return the last output, when the events have ended.

        Raises Unavailable if the server gave no reason for the end.
        """
        ...


class Route(Protocol):
    """Put requests to one endpoint of a server. `name` is one of the setting `engine_route`."""

    name: str
    path: str
    features: Features

    def body(self, request: Generate, pictures: Sequence[Picture] = ()) -> dict[str, Any]:
        """Return the body of the request, whose reply continues `request.output`.

        `pictures`: those of `request.chat`, which only some routes take.
        """
        ...

    def reply(self, request: Generate) -> Reply:
        """Return the reader of the request's reply."""
        ...


class Ending:
    """Keep a reply's finish reason, cached tokens and prompt tokens until its events have ended."""

    def __init__(self) -> None:
        self.finish = ""
        self.prompt_tokens = 0
        self._cached = -1

    def note(self, finish: str | None, usage: Any) -> None:
        """Record what an event tells; either may be absent.

        Raises Unavailable for the finish reason of a reply that the server broke off.
        """
        if finish in _BROKEN_OFF:
            raise Unavailable(f"the engine's server broke a reply off: {finish}")
        if finish:
            self.finish = "length" if finish == "length" else "stop"
        if isinstance(usage, dict):
            length = usage.get("prompt_tokens")
            self.prompt_tokens = length if isinstance(length, int) else self.prompt_tokens
            details = usage.get("prompt_tokens_details")
            if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
                self._cached = details["cached_tokens"]

    def output(self) -> StepOutput:
        """Return the last output. Raises Unavailable without a finish reason."""
        if not self.finish:
            raise Unavailable("the engine's server ended a reply without a finish reason")
        return StepOutput(finish=self.finish, cached_tokens=self._cached)


def read_event(decode: Callable[[bytes], E], data: bytes) -> E:
    """Decode an event. Raises MotetError if it cannot be read, or carries an error."""
    try:
        event = decode(data)
    except msgspec.DecodeError as error:
        message = f"the engine's server sends an event that cannot be read: {error}"
        raise Unavailable(message) from None
    if event.error:
        raise of_event(event.error)
    return event


def cut_at_stop(ids: list[int], stops: Container[int]) -> int:
    """Return how many ids belong to the reply, an end token included; len(ids) if none ends it."""
    return next((n + 1 for n, number in enumerate(ids) if number in stops), len(ids))
