"""Define the frames between a service and a decoding child.

Each frame is one SOCK_SEQPACKET packet; payloads are in the shared window.

service                    child
                      <-   Hello            confined and ready
Job (first input)     ->
Continue (more input) <->  Continue         as often as the input needs windows
                      <-   Part             a piece of a result lies in the window
Continue              ->                    copied; the child is at most one part ahead
                      <-   Done | Refusal
"""

from __future__ import annotations

import msgspec

WINDOW = 8 << 20  # bytes
MAX_FRAME = 65536  # maximum bytes of a frame
Value = str | int | float


class Hello(msgspec.Struct, tag="hello"):
    """Report which protections the system granted."""

    confinement: dict[str, bool]


class DecodeJob(msgspec.Struct, tag="job"):
    """Request a task with `nbytes` of input.

    `cpu` in seconds and `memory` in bytes apply to this job only.
    """

    task: str
    nbytes: int
    cpu: float
    memory: int
    args: dict[str, Value] = msgspec.field(default_factory=dict)


class Continue(msgspec.Struct, tag="continue"):
    """Hand the window over to the other side."""


class ResultPart(msgspec.Struct, tag="part"):
    """Hand over `nbytes` in the window; with `more`, the payload continues in the next part."""

    nbytes: int
    more: bool = False
    meta: dict[str, Value] = msgspec.field(default_factory=dict)


class JobDone(msgspec.Struct, tag="done"):
    """End a job successfully."""


class Refusal(msgspec.Struct, tag="refusal"):
    """End a job with an error.

    `code` is one of `motet_shared.errors`, "memory" or "crash".
    """

    code: str
    message: str
    param: str | None = None


Answer = Hello | Continue | ResultPart | JobDone | Refusal
encode = msgspec.json.encode
answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)
jobs: msgspec.json.Decoder[DecodeJob | Continue] = msgspec.json.Decoder(DecodeJob | Continue)
