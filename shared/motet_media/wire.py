"""Define the frames between a service and a decoding child.

Each frame is one SOCK_SEQPACKET packet; payloads are in the shared window.

service                    child
                      <-   Hello            confined and ready
Order (first input)   ->
Go (further input)    <->  Go               as often as the input needs windows
                      <-   Part             a piece of a result lies in the window
Go                    ->                    copied; the child is at most one part ahead
                      <-   Done | Refusal
"""

from __future__ import annotations

import msgspec

WINDOW = 8 << 20  # bytes
MOST = 65536  # maximum bytes of a frame
Value = str | int | float


class Hello(msgspec.Struct, tag="hello"):
    """Report which protections the system granted."""

    confinement: dict[str, bool]


class Order(msgspec.Struct, tag="order"):
    """Request a task with `nbytes` of input.

    `cpu` in seconds and `memory` in bytes apply to this order only.
    """

    task: str
    nbytes: int
    cpu: float
    memory: int
    args: dict[str, Value] = msgspec.field(default_factory=dict)


class Go(msgspec.Struct, tag="go"):
    """Hand the window over to the other side."""


class Part(msgspec.Struct, tag="part"):
    """Hand over `nbytes` in the window; with `more`, the payload continues in the next part."""

    nbytes: int
    more: bool = False
    meta: dict[str, Value] = msgspec.field(default_factory=dict)


class Done(msgspec.Struct, tag="done"):
    """End an order successfully."""


class Refusal(msgspec.Struct, tag="refusal"):
    """End an order with an error.

    `code` is one of `motet_shared.errors`, "memory" or "crash".
    """

    code: str
    message: str
    param: str | None = None


Answer = Hello | Go | Part | Done | Refusal
encode = msgspec.json.encode
answers: msgspec.json.Decoder[Answer] = msgspec.json.Decoder(Answer)
orders: msgspec.json.Decoder[Order | Go] = msgspec.json.Decoder(Order | Go)
