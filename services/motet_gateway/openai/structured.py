"""Convert structured output parameters and tool choices from a body to the wire format.

`response_format` is OpenAI's, `structured_outputs` the extension that servers of open models share,
with the older names `guided_json`, `guided_regex`, `guided_choice` and `guided_grammar`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from motet_gateway.http.fields import Name, Strict
from motet_shared.errors import BadRequest, UnsupportedParameter
from motet_shared.messages import Grammar


class TextFormat(Strict, tag="text"):
    pass


class JsonFormat(Strict, tag="json_object"):
    pass


class JsonSchema(Strict):
    """A JSON schema; the reply is always constrained to all of it, with or without `strict`."""

    name: Name
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class SchemaFormat(Strict, tag="json_schema"):
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonFormat | SchemaFormat


class StructuredOutputs(Strict):
    """A constraint on the reply; exactly one field may be set.

    `json` is a schema as an object or as text; `grammar` is in Lark's or llama.cpp's syntax.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


_ANY_OBJECT = '{"type":"object"}'
_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object")
# Names that vLLM gave these constraints before `structured_outputs`.
ALIASES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def grammar_of(
    response_format: ResponseFormat | None,
    structured: StructuredOutputs | None,
    guided: Mapping[str, Any] = MappingProxyType({}),
) -> Grammar | None:
    """Return the grammar that constrains the reply, or None.

    guided: values by the names of ALIASES. Raises BadRequest if more than one constraint is given,
    or not exactly one field of `structured_outputs` is set.
    """
    ways = [_of_response_format(response_format)]
    if structured is not None:
        ways.append(_of_structured(structured))
    ways += [_of_constraint(ALIASES[name], value, name) for name, value in guided.items()]
    grammars = [way for way in ways if way is not None]
    if len(grammars) > 1:
        first, second = (grammar.param for grammar in grammars[:2])
        param = second.partition(".")[0]
        message = f"`{second}` and `{first}` both constrain the reply; send one of them"
        raise BadRequest(message, param=param)
    return grammars[0] if grammars else None


def _of_structured(structured: StructuredOutputs) -> Grammar:
    ways = [name for name in _CONSTRAINTS if getattr(structured, name) not in (None, False)]
    if len(ways) != 1:
        given = " and ".join(f"`{way}`" for way in ways) or "none"
        message = (
            f"`structured_outputs` takes exactly one of {', '.join(_CONSTRAINTS)}, not {given}"
        )
        raise BadRequest(message, param="structured_outputs")
    return _of_constraint(ways[0], getattr(structured, ways[0]), f"structured_outputs.{ways[0]}")


def _of_response_format(wanted: ResponseFormat | None) -> Grammar | None:
    if isinstance(wanted, JsonFormat):
        return Grammar(kind="json_schema", text=_ANY_OBJECT, param="response_format")
    if isinstance(wanted, SchemaFormat):
        schema, param = wanted.json_schema.schema, "response_format.json_schema.schema"
        if schema is None:
            raise BadRequest(f"`{param}` is required", param=param)
        return Grammar(kind="json_schema", text=_json(schema), param=param)
    return None


def _of_constraint(way: str, value: Any, param: str) -> Grammar:
    if way == "json_object":
        return Grammar(kind="json_schema", text=_ANY_OBJECT, param=param)
    if way == "json":
        return Grammar(
            kind="json_schema", text=value if isinstance(value, str) else _json(value), param=param
        )
    if way == "choice":
        return Grammar(kind="choice", text=_json(value), param=param)
    return Grammar(kind="regex" if way == "regex" else "grammar", text=value, param=param)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


# --------------------------------------------------------------------------------------------------------- tool choice
@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The tool choice of a request.

    `tool` names the one that must be called if `kind` is "required"; empty: any.
    """

    kind: Literal["auto", "none", "required"] = "auto"
    tool: str = ""

    def as_realtime(self) -> str | dict[str, str]:
        """Return the value in the format of a realtime session."""
        return {"type": "function", "name": self.tool} if self.tool else self.kind


AUTO_TOOL_CHOICE = ToolChoice()


class _Function(Strict):
    name: str


class _Nested(Strict):
    """A named function in the format of the chat API."""

    type: Literal["function"]
    function: _Function


class _Flat(Strict):
    """A named function in the format of the realtime API."""

    type: Literal["function"]
    name: str


def tool_choice_of(choice: Any, param: str = "tool_choice") -> ToolChoice:
    """Parse a tool choice; accepts a named function in both formats.

    Raises UnsupportedParameter for anything else.
    """
    if choice is None:
        return AUTO_TOOL_CHOICE
    if choice in ("auto", "none", "required"):
        return ToolChoice(choice)
    with suppress(msgspec.ValidationError):
        return ToolChoice("required", msgspec.convert(choice, _Nested).function.name)
    with suppress(msgspec.ValidationError):
        return ToolChoice("required", msgspec.convert(choice, _Flat).name)
    shown = _json(choice)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    message = f"`{param}` {shown} is not supported; send 'auto', 'none', 'required' or the name of a function"
    raise UnsupportedParameter(message, param=param)


def check_tool_choice(choice: ToolChoice, tools: list[str], param: str = "tool_choice") -> None:
    """Raise BadRequest if a required tool is not among `tools`, given by name."""
    if choice.kind != "required":
        return
    if not tools:
        raise BadRequest(
            f"`{param}`: a call is required but `tools` is empty; add `tools`", param=param
        )
    if choice.tool and choice.tool not in tools:
        raise BadRequest(
            f"`{param}`: there is no tool {choice.tool!r}; name one of `tools`", param=param
        )
