"""Define the types of fields that clients send, and the base of their structs."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

# Of tools in the protocols that allow longer ones than OpenAI: MCP clients put a server's name first.
ToolName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,128}$")]
Name = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Ratio = Annotated[float, Meta(ge=0, le=1)]
# Limited to the 64-bit integers that the wire and tensors can hold.
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]


class Strict(Struct, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Reject unknown fields; base of every struct that a client sends."""
