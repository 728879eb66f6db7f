"""Define a workload's requests, and the bytes that are sent for each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Endpoint = Literal["chat", "completions"]
PATHS: dict[Endpoint, str] = {"chat": "/chat/completions", "completions": "/completions"}


@dataclass(frozen=True, slots=True)
class Request:
    """A request. `arrival`: seconds from the start until it is due; a closed loop ignores it."""

    arrival: float
    prompt: str
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Fields that all requests of a run share. `extra` fields replace those of the same name."""

    endpoint: Endpoint
    model: str
    temperature: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, request: Request) -> bytes:
        """Return the JSON body: it asks for a stream that ends with its usage."""
        if self.endpoint == "chat":
            said: dict[str, Any] = {"messages": [{"role": "user", "content": request.prompt}]}
        else:
            said = {"prompt": request.prompt}
        fields = {
            "model": self.model,
            **said,
            "max_tokens": request.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        return msgspec.json.encode(fields)
