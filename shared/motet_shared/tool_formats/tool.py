"""Represent a function that a model may call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Tool:
    """Name of a function and the JSON schema of its arguments.

    strict: calls must satisfy the schema; otherwise keywords that cannot be enforced are ignored.
    """

    name: str
    schema: Mapping[str, Any]
    strict: bool = False

    @classmethod
    def of(cls, tool: Mapping[str, Any]) -> Tool:
        """Return the function of a tool in OpenAI's format. Without parameters it takes none."""
        function = tool.get("function") or {}
        parameters = function.get("parameters") or {"additionalProperties": False}
        return cls(
            name=function.get("name") or "",
            schema={"type": "object", **parameters},
            strict=bool(function.get("strict")),
        )
