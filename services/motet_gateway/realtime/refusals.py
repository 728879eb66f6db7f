"""Refuse by name the tools of a session that other servers host: MCP, web search and others."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from motet_shared.errors import BadRequest, UnsupportedParameter

_TOOL = re.compile(r"(?:session|response)\.tools\[(?P<index>\d+)\]\.(?P<rest>.+)")
_MCP = "connect to the MCP server from the client, and declare its tools as functions"
_FUNCTION = "declare a function that does it, and run it in the client"
_LONGEST = 60


def as_refusal(error: BadRequest, data: bytes | str) -> BadRequest:
    """Return the error of an event, or a refusal of the tool's type if that is not `function`.

    data: the event, which is decoded once more for its error.
    """
    found = _TOOL.fullmatch(error.param or "")
    if found is None:
        return error
    where = str(error.param).removesuffix("." + found["rest"])
    kind = _type_at(data, where)
    if kind in ("function", None):
        return error
    param = f"{where}.type"
    remedy = _MCP if kind == "mcp" else _FUNCTION
    message = f"`{param}` {kind[:_LONGEST]!r} is not served here; {remedy}"
    return UnsupportedParameter(message, param=param)


def _type_at(data: bytes | str, path: str) -> str | None:
    """Return the type of the tool at a path, if it is a text."""
    try:
        value: Any = msgspec.json.decode(data)
        for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
            value = value[name] if name else value[int(index)]
        kind = value["type"]
    except (msgspec.MsgspecError, UnicodeError, LookupError, TypeError):
        return None
    return kind if isinstance(kind, str) else None
