"""Define the tools of a response and the choice among them, and convert both to those of a chat.

The model knows functions only: a custom tool, whose input is free text, is a function with one
parameter of type string.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from motet_gateway.http.fields import Name, Strict
from motet_gateway.images.options import ImageTool
from motet_gateway.openai.schema import Function, FunctionTool, Tool
from motet_gateway.openai.structured import ToolChoice
from motet_shared.errors import BadRequest, UnsupportedParameter

INPUT = "input"  # the parameter of a custom tool's function
_IMAGES = "image_generation"


class FunctionDeclaration(Strict, tag="function"):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class AnyText(Strict, tag="text"):
    pass


class Pattern(Strict, tag="grammar"):
    """A grammar of a custom tool's input; only regular expressions can be kept inside of a call."""

    syntax: Literal["regex", "lark"]
    definition: str


class CustomTool(Strict, tag="custom"):
    name: Name
    description: str | None = None
    format: AnyText | Pattern | None = None


Declaration = FunctionDeclaration | CustomTool | ImageTool


class ChosenFunction(Strict, tag="function"):
    name: str


class ChosenCustom(Strict, tag="custom"):
    name: str


class ChosenImages(Strict, tag="image_generation"):
    pass


NamedTool = ChosenFunction | ChosenCustom | ChosenImages


class AllowedTools(Strict, tag="allowed_tools"):
    """The tools among which the model may choose now."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


Choice = Literal["none", "auto", "required"] | AllowedTools | NamedTool


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The tools of a chat, the choice among them, and the names of those with free text as input."""

    tools: list[Tool]
    choice: ToolChoice
    custom: frozenset[str]


def offered(declared: list[Declaration], choice: Choice | None) -> OfferedTools:
    """Convert tools and `tool_choice`.

    Raises BadRequest or UnsupportedParameter, which name the tool.
    """
    for index, tool in enumerate(declared):
        _check(tool, f"tools[{index}]")
    _check_names(declared)
    allowed, chosen = _chosen(choice)
    if allowed is not None:
        declared = _only(declared, allowed)
    custom = frozenset(tool.name for tool in declared if isinstance(tool, CustomTool))
    return OfferedTools([_as_chat(tool) for tool in declared], chosen, custom)


def _check(tool: Declaration, where: str) -> None:
    if not isinstance(tool, CustomTool) or not isinstance(tool.format, Pattern):
        return
    if tool.format.syntax == "lark":
        param = f"{where}.format.syntax"
        message = f"`{param}` lark is not supported within a tool call; send regex, or format text"
        raise UnsupportedParameter(message, param=param)


def _check_names(declared: list[Declaration]) -> None:
    seen: set[str] = set()
    for index, tool in enumerate(declared):
        if isinstance(tool, ImageTool):
            continue
        if tool.name in seen:
            param = f"tools[{index}].name"
            raise BadRequest(f"`{param}` {tool.name!r} is there twice; rename one", param=param)
        seen.add(tool.name)


def _chosen(choice: Choice | None) -> tuple[list[NamedTool] | None, ToolChoice]:
    """Return the allowed tools (None: all) and the choice in the chat's terms."""
    if choice is None or isinstance(choice, str):
        return None, ToolChoice(choice or "auto")
    if isinstance(choice, AllowedTools):
        return choice.tools, ToolChoice(choice.mode)
    if isinstance(choice, ChosenImages):
        message = "`tool_choice`: an image cannot be required; send 'auto'"
        raise UnsupportedParameter(message, param="tool_choice")
    return None, ToolChoice("required", choice.name)


def _only(declared: list[Declaration], allowed: list[NamedTool]) -> list[Declaration]:
    """Return the declared tools that are allowed. Raises BadRequest for one that is not declared."""
    by_name = {_name(tool): tool for tool in declared}
    kept = []
    for index, named in enumerate(allowed):
        name = _name(named)
        if name not in by_name:
            param = f"tool_choice.tools[{index}].name"
            raise BadRequest(f"`{param}`: there is no tool {name!r} in `tools`", param=param)
        kept.append(by_name[name])
    return kept


def _name(tool: Declaration | NamedTool) -> str:
    return _IMAGES if isinstance(tool, ImageTool | ChosenImages) else tool.name


def _as_chat(tool: Declaration) -> Tool:
    if isinstance(tool, ImageTool):
        return tool
    if isinstance(tool, FunctionDeclaration):
        return FunctionTool(
            function=Function(
                name=tool.name,
                description=tool.description,
                parameters=tool.parameters,
                strict=tool.strict,
            )
        )
    text: dict[str, Any] = {"type": "string"}
    if isinstance(tool.format, Pattern):
        text["pattern"] = _whole(tool.format.definition)
    parameters = {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }
    # Strict, so that the input can be taken out of the arguments in any case.
    function = Function(
        name=tool.name, description=tool.description, parameters=parameters, strict=True
    )
    return FunctionTool(function=function)


def _whole(pattern: str) -> str:
    """Return a pattern of JSON Schema, which may match anywhere, that matches the whole input."""
    pattern = pattern.removeprefix("^")
    if pattern.endswith("$") and not pattern.endswith("\\$"):
        pattern = pattern[:-1]
    return f"^(?:{pattern})$"


def echoed(tool: Declaration) -> dict[str, Any]:
    """Return a tool as the response repeats it: a function with all of its fields."""
    shape: dict[str, Any] = msgspec.to_builtins(tool)
    if isinstance(tool, FunctionDeclaration):
        fields = {"description": None, "parameters": None, "strict": False}
        return {**fields, **shape}
    if isinstance(tool, CustomTool):
        return {"format": {"type": "text"}, **shape}
    return shape


def echoed_choice(choice: Choice | None) -> Any:
    """Return `tool_choice` as the response repeats it."""
    return "auto" if choice is None else msgspec.to_builtins(choice)
