"""Refuse by name what other servers host: their tools, items of those tools, and their results."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from motet_shared.errors import BadRequest, UnsupportedParameter

_TYPE = re.compile(r"(?P<list>tools|input|tool_choice|include)(?:\[(?P<index>\d+)\])?(?P<rest>.*)")
_FUNCTION = "declare a function that does it, and run it in the client"
_MCP = (
    "connect to the MCP server from the client, whose tools are then functions (docs/responses.md)"
)
_REMEDIES = {
    "mcp": _MCP,
    "web_search": _FUNCTION,
    "web_search_preview": _FUNCTION,
    "file_search": _FUNCTION,
    "code_interpreter": _FUNCTION,
    "computer_use_preview": _FUNCTION,
    "computer": _FUNCTION,
    "local_shell": _FUNCTION,
    "shell": _FUNCTION,
    "apply_patch": _FUNCTION,
    "tool_search": "list all tools in `tools`",
    "namespace": "list all tools in `tools`",
    "input_audio": "send it to /v1/audio/transcriptions first",
}
_DATED = re.compile(r"_\d{4}_\d\d_\d\d$")  # such as web_search_2025_08_26
_LONGEST = 60


def as_refusal(error: BadRequest, data: bytes) -> BadRequest:
    """Return the error of a body, or a refusal by name if it is of a kind that is not served.

    `data`: the body, which is decoded once more for its error.
    """
    found = _TYPE.fullmatch(error.param or "")
    if found is None:
        return error
    kind = _kind_at(data, str(error.param))
    if kind is None:
        return error
    name = _DATED.sub("", kind)
    remedy = _REMEDIES.get(name, _REMEDIES.get(name.partition("_call")[0], "leave it out"))
    message = f"`{error.param}` {kind[:_LONGEST]!r} is not served here; {remedy}"
    return UnsupportedParameter(message, param=error.param)


def _kind_at(data: bytes, param: str) -> str | None:
    """Return the type that stands at a path, if it is a text and the path is of a type."""
    if not (param.endswith(".type") or param.startswith("include[")):
        return None
    try:
        value: Any = msgspec.json.decode(data)
        for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", param):
            value = value[name] if name else value[int(index)]
    except (msgspec.MsgspecError, LookupError, TypeError):
        return None
    return value if isinstance(value, str) else None
