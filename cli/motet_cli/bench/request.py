"""Define the requests of a workload and encode their bodies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Endpoint = Literal["chat", "completions", "speech"]
PATHS: dict[Endpoint, str] = {
    "chat": "/chat/completions",
    "completions": "/completions",
    "speech": "/audio/speech",
}
KINDS: dict[Endpoint, str] = {"chat": "chat", "completions": "chat", "speech": "speech"}


@dataclass(frozen=True, slots=True)
class Request:
    """Represent a request to send.

    arrival: seconds from the start of the run until it is due; a closed loop ignores it.
    """

    arrival: float
    prompt: str
    max_tokens: int


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Hold the fields that all requests of a run share.

    extra: further fields, which replace those of the same name.
    """

    endpoint: Endpoint
    model: str
    temperature: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def body(self, request: Request) -> bytes:
        """Return the JSON body of a streamed request, with usage where there is such a field."""
        if self.endpoint == "speech":
            spoken = {"model": self.model, "input": request.prompt, "voice": "alloy"}
            return msgspec.json.encode({**spoken, "response_format": "pcm", **self.extra})
        if self.endpoint == "chat":
            prompt_fields: dict[str, Any] = {
                "messages": [{"role": "user", "content": request.prompt}]
            }
        else:
            prompt_fields = {"prompt": request.prompt}
        fields = {
            "model": self.model,
            **prompt_fields,
            "max_tokens": request.max_tokens,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        return msgspec.json.encode(fields)
