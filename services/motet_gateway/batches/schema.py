"""Define what clients send to /v1/batches, and the lines of the files that they name."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from motet_gateway.files.schema import ExpiresAfter
from motet_gateway.http.fields import Metadata, Strict

Endpoint = Literal[
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/audio/speech",
]
MOST_LISTED = 100
_WINDOW = "[1-9][0-9]{0,3}[smhd]"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class BatchBody(Strict):
    """Body of POST /v1/batches. OpenAI's only window is 24h; others are an extension."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Annotated[str, Meta(pattern=f"^{_WINDOW}$")]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchesQuery(Strict):
    after: str | None = None
    limit: Annotated[int, Meta(ge=1, le=MOST_LISTED)] = 20


class BatchLine(Strict):
    """A line of the input file."""

    custom_id: Annotated[str, Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: str
    body: msgspec.Raw


def window_seconds(window: str) -> int:
    """Return the seconds of a valid completion window such as 24h."""
    return int(window[:-1]) * _SECONDS[window[-1]]
