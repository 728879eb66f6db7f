"""Parse formats that write each parameter of a call between tags.

Strings are written as they are, other values as JSON; the schema of the tool tells which is which.
Arguments are emitted parameter by parameter.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, ClassVar

from motet_shared.errors import UnsupportedParameter
from motet_shared.text.grammars import json_rule

from .expected import Expected
from .parser import ToolParser
from .tool import Tool
from .tool_format import alternatives, literal

# Keywords of a string's schema that raw text needs no constraint for.
_UNCONSTRAINED = {"type", "enum", "const", "title", "description", "default", "examples"}
_TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    list: "array",
    dict: "object",
    type(None): "null",
}


class _State(Enum):
    HEAD = "head"
    PARAMETERS = "parameters"
    TAIL = "tail"


class ParameterCallParser(ToolParser):
    """Parse calls of tagged parameters.

    head: what follows `opening`, with an expression `name`. mark: the beginning of a parameter,
    whose first group is its name, or the end of all, where that group is None; no mark may begin
    within another. value_close: ends a value. call_close: ends the call behind its parameters;
    empty: the last mark does. repeats: other calls may stand before `call_close`.
    """

    head: ClassVar[Expected]
    mark: ClassVar[re.Pattern[str]]
    value_close: ClassVar[str]
    call_close: ClassVar[str] = ""
    repeats: ClassVar[bool] = False

    def __init__(self, request_id: str, tools: Sequence[Tool] = ()):
        super().__init__(request_id, tools)
        self._state = _State.HEAD
        self._schema: Mapping[str, Any] = {}
        self._count = 0  # parameters of the current call

    def _parse_call(self) -> bool:
        if self._state is _State.HEAD:
            return self._read_head()
        if self._state is _State.PARAMETERS:
            return self._read_parameter()
        return self._read_tail()

    def _end_call(self, rest: str) -> None:
        if self._state is _State.HEAD:
            self._text.append(self._lead + rest)
        self._state = _State.HEAD

    def _read_head(self) -> bool:
        match = self.head.match(self._buffer)
        if match is None:
            if self.head.may_match(self._buffer):
                return False
            self._leave(self._buffer, restored=self._lead)
            return True
        self._begin_call(match["name"])
        tool = self.tools.get(match["name"])
        self._schema, self._count = {} if tool is None else tool.schema, 0
        self._buffer, self._state = self._buffer[match.end() :], _State.PARAMETERS
        self._add_arguments("{")
        return True

    def _read_parameter(self) -> bool:
        """Emit the next parameter, or the end of the arguments; drop text that is neither."""
        mark = self.mark.search(self._buffer)
        if mark is None:
            return False
        if mark[1] is None:
            self._add_arguments("}")
            self.calls += 1
            self._buffer = self._buffer[mark.end() :]
            self._state = _State.TAIL
            return True
        end = self._buffer.find(self.value_close, mark.end())
        if end < 0:
            return False
        value = parameter_value(self._buffer[mark.end() : end], _property(self._schema, mark[1]))
        item = f"{json.dumps(mark[1], ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"
        self._add_arguments(f", {item}" if self._count else item)
        self._count += 1
        self._buffer = self._buffer[end + len(self.value_close) :]
        return True

    def _read_tail(self) -> bool:
        rest = self._buffer.lstrip()
        if self.call_close and not rest.startswith(self.call_close):
            if self.repeats and self.head.match(self._buffer):
                self._state = _State.HEAD
                return True
            if self.call_close.startswith(rest) or (
                self.repeats and self.head.may_match(self._buffer)
            ):
                return False
            self._leave(rest)
        else:
            self._leave(rest[len(self.call_close) :])
        self._state = _State.HEAD
        return True


def parameter_value(text: str, schema: Mapping[str, Any]) -> Any:
    """Return the value of a parameter of this schema: `text` itself, or the JSON that it is."""
    types = _types(schema)
    text = text.removeprefix("\n").removesuffix("\n")
    if types == {"string"}:
        return text
    written = json_value(text)
    if written is None:
        return text
    value = json.loads(written)
    if "string" in types and not _is_of(value, types - {"string"}):
        return text
    return value


def json_value(text: str) -> str | None:
    """Return a JSON value as `json.dumps` writes it; None if `text` is none, NaN or infinite."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None


def _property(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    properties = schema.get("properties")
    found = properties.get(name) if isinstance(properties, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema names, at its top or in its alternatives; empty: any.

    A client's schema may be anything: what is no schema names no type.
    """
    if "enum" in schema or "const" in schema:
        return {_TYPES.get(type(value), "") for value in _choices(schema)}
    parts = [schema, *_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]
    named = [part.get("type") for part in parts if isinstance(part, Mapping)]
    kinds = [kind for one in named for kind in (one if isinstance(one, list) else [one])]
    return {kind for kind in kinds if isinstance(kind, str)}


def _choices(schema: Mapping[str, Any]) -> list[Any]:
    return [schema["const"]] if "const" in schema else _list(schema.get("enum"))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_of(value: Any, types: set[str]) -> bool:
    kind = _TYPES[type(value)]
    return kind in types or (kind == "integer" and "number" in types)


# -------------------------------------------------------------------------------------------- grammar
def parameter_rules(
    rule: str, tool: Tool, *, head: str, opening: Callable[[str], str], close: str, tail: str
) -> list[str]:
    """Return the rules of a tool's calls: `head`, the parameters in the schema's order, `tail`.

    opening: what begins the parameter of a name; close: the text that ends its value. All but
    `close` are expressions. Raises
    UnsupportedParameter for keywords of strings that raw text cannot be held to, where the tool is
    strict.
    """
    properties = tool.schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = _list(tool.schema.get("required"))
    names = [f"{rule}_{index}" for index in range(len(properties))]
    items = [
        name if key in required else f"{name}?" for name, key in zip(names, properties, strict=True)
    ]
    rules = [f"{rule}: {head} {' '.join(items)} {tail}"]
    for name, (key, schema) in zip(names, properties.items(), strict=True):
        rules += _value_rules(name, opening(key), schema, tool, close)
    return rules


def _value_rules(rule: str, opening: str, schema: Any, tool: Tool, close: str) -> list[str]:
    schema = schema if isinstance(schema, Mapping) else {}
    if "string" not in _types(schema):
        value = json_rule(_with_definitions(schema, tool.schema), lenient=not tool.strict)
        return [f"{rule}: {opening} {value} {literal(close)}"]
    if choices := _choices(schema):
        texts = [one if isinstance(one, str) else json.dumps(one) for one in choices]
        value = alternatives(map(literal, texts))
        return [f"{rule}: {opening} {value} {literal(close)}"]
    if tool.strict and (unknown := sorted(schema.keys() - _UNCONSTRAINED)):
        raise UnsupportedParameter(
            f"`tools`: {tool.name!r} is strict, but its strings cannot be held to {', '.join(unknown)}; "
            "leave them out",
            param="tools",
        )
    return [
        f"{rule}: {opening} {rule}_text",
        f"{rule}_text[lazy]: /(.|\\n)*/ {literal(close)}",
    ]


def _with_definitions(schema: Mapping[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """Return a property's schema with the definitions that its references point to."""
    kept = {key: root[key] for key in ("$defs", "definitions") if key in root}
    return {**kept, **schema}
