"""What a client wants a reply to look like, and which tools it wants called: from its body to the wire.

`response_format` is OpenAI's, `structured_outputs` the extension that servers of open models share.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from motet_shared.errors import BadRequest, UnsupportedParameter
from motet_shared.messages import Grammar

from .fields import Name, Strict


class TextFormat(Strict, tag="text"):
    pass


class JsonFormat(Strict, tag="json_object"):
    pass


class JsonSchema(Strict):
    """With `strict` or without, the reply is held to all of the schema."""

    name: Name
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class SchemaFormat(Strict, tag="json_schema"):
    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonFormat | SchemaFormat


class StructuredOutputs(Strict):
    """One of these. `json`: a schema, or one as text. `grammar`: Lark's syntax or llama.cpp's."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


_ANY_OBJECT = '{"type":"object"}'
_WAYS = ("json", "regex", "choice", "grammar", "json_object")


def grammar_of(response_format: ResponseFormat | None, structured: StructuredOutputs | None) -> Grammar | None:
    """What the reply is held to; None: to nothing. BadRequest if both parameters, or two ways, ask for something."""
    formatted = _of_format(response_format)
    if structured is None:
        return formatted
    ways = [name for name in _WAYS if getattr(structured, name) not in (None, False)]
    if len(ways) != 1:
        given = " and ".join(f"`{way}`" for way in ways) or "none"
        message = f"`structured_outputs` takes one of {', '.join(_WAYS)}, and has {given}; send one"
        raise BadRequest(message, param="structured_outputs")
    if formatted is not None:
        message = f"`structured_outputs` and `{formatted.param}` both shape the reply; send one of them"
        raise BadRequest(message, param="structured_outputs")
    return _of_way(ways[0], getattr(structured, ways[0]))


def _of_format(wanted: ResponseFormat | None) -> Grammar | None:
    if isinstance(wanted, JsonFormat):
        return Grammar(kind="json_schema", text=_ANY_OBJECT, param="response_format")
    if isinstance(wanted, SchemaFormat):
        schema, param = wanted.json_schema.schema, "response_format.json_schema.schema"
        if schema is None:
            raise BadRequest(f"`{param}` is required", param=param)
        return Grammar(kind="json_schema", text=_json(schema), param=param)
    return None


def _of_way(way: str, value: Any) -> Grammar:
    param = f"structured_outputs.{way}"
    if way == "json_object":
        return Grammar(kind="json_schema", text=_ANY_OBJECT, param=param)
    if way == "json":
        return Grammar(kind="json_schema", text=value if isinstance(value, str) else _json(value), param=param)
    if way == "choice":
        return Grammar(kind="choice", text=_json(value), param=param)
    return Grammar(kind="regex" if way == "regex" else "grammar", text=value, param=param)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


# --------------------------------------------------------------------------------------------------------- tool choice
@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`tool`: the one that must be called, if `kind` is "required" and it matters."""

    kind: Literal["auto", "none", "required"] = "auto"
    tool: str = ""

    def as_realtime(self) -> str | dict[str, str]:
        """As a session shows it."""
        return {"type": "function", "name": self.tool} if self.tool else self.kind


AS_THE_MODEL_LIKES = ToolChoice()


class _Function(Strict):
    name: str


class _Nested(Strict):
    """As chat has it."""

    type: Literal["function"]
    function: _Function


class _Flat(Strict):
    """As the realtime API has it."""

    type: Literal["function"]
    name: str


def tool_choice_of(choice: Any, param: str = "tool_choice") -> ToolChoice:
    """Both shapes of a named function will do. UnsupportedParameter for what is none of all this."""
    if choice is None:
        return AS_THE_MODEL_LIKES
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
    """BadRequest if what must be called is not among the tools, by their names."""
    if choice.kind != "required":
        return
    if not tools:
        raise BadRequest(f"`{param}`: there is nothing to call; give `tools`", param=param)
    if choice.tool and choice.tool not in tools:
        raise BadRequest(f"`{param}`: there is no tool {choice.tool!r}; name one of `tools`", param=param)
