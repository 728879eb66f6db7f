"""Build the grammar of a reply where a client's request constrains the model's tool calls.

The calls are those of the model's `ToolFormat`. The grammar is in Lark's syntax, with JSON schemas
embedded; its compiler reports the schema keywords that it does not support.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from motet_shared.errors import BadRequest, UnsupportedParameter
from motet_shared.messages import Chat, Grammar
from motet_shared.text.characters import characters, is_deeper
from motet_shared.text.grammars import LONGEST, json_rule
from motet_shared.tool_formats.tool import Tool
from motet_shared.tool_formats.tool_format import ReplyGrammar, ToolFormat
from motet_tokenizer.dialect import Dialect

DEEPEST = 512  # lists and mappings that a value of a tool may lie within


def grammar_of(chat: Chat, tools: list[dict[str, Any]], dialect: Dialect) -> Grammar | None:
    """Return the grammar of the reply to a chat with these tools, or None if it is unconstrained.

    Raises UnsupportedParameter for tools of a model whose format is not known, or constraints of
    calls for which there is no grammar; BadRequest if tools and constraints contradict each other,
    or if the tools are too long or nested too deeply.
    """
    if tools and not dialect.calls_tools:
        message = (
            f"tools: it is not known how model {chat.model!r} writes tool calls; leave them out, or "
            "start the tokenizer with --tool-format"
        )
        raise UnsupportedParameter(message, param="tools")
    required = chat.tool_choice == "required"
    if not required and not tools:
        return chat.grammar
    functions = [Tool.of(tool) for tool in tools]
    single_or_strict = not chat.parallel_tools or any(tool.strict for tool in functions)
    if not required and chat.grammar is None and not single_or_strict:
        return None
    if characters(tools, LONGEST) > LONGEST:
        message = f"`tools` have more than {LONGEST} characters, too many for a grammar of calls"
        raise BadRequest(f"{message}; shorten them", param="tools")
    if is_deeper(tools, DEEPEST):
        message = f"`tools` are nested more than {DEEPEST} deep; flatten them"
        raise BadRequest(message, param="tools")
    try:
        return _grammar(chat, functions, dialect.tool_format)
    except RecursionError:
        raise BadRequest("`tools` are nested too deeply; flatten them", param="tools") from None


def _grammar(chat: Chat, tools: Sequence[Tool], tool_format: ToolFormat | None) -> Grammar:
    if not tools:
        raise BadRequest(
            "`tool_choice`: there are no tools to call; give `tools`", param="tool_choice"
        )
    if tool_format is None:
        param = "tool_choice" if chat.tool_choice == "required" else "tools"
        message = (
            f"{param}: the calls of model {chat.model!r} are read by its response template, and there "
            "is no grammar that they could be held to; leave constraints of calls out"
        )
        raise UnsupportedParameter(message, param=param)
    calls = tool_format.grammar
    if chat.tool_choice == "required":
        return _required(chat, tools, calls)
    if chat.grammar is not None:
        return _calls_or(chat.grammar, chat, tools, calls)
    return _lark(calls.in_text(tools, several=chat.parallel_tools))


def _required(chat: Chat, tools: Sequence[Tool], calls: ReplyGrammar) -> Grammar:
    """Return a grammar of calls only, at least one; exactly one if a tool is named."""
    if chat.tool:
        tools = [tool for tool in tools if tool.name == chat.tool]
        if not tools:
            raise BadRequest(
                f"`tool_choice`: there is no tool {chat.tool!r}; name one of `tools`",
                param="tool_choice",
            )
    return _lark(calls.required(tools, several=chat.parallel_tools and not chat.tool))


def _calls_or(grammar: Grammar, chat: Chat, tools: Sequence[Tool], calls: ReplyGrammar) -> Grammar:
    """Return a grammar of calls, or of a reply that follows `grammar`."""
    if grammar.kind != "json_schema":
        raise BadRequest(
            f"`{grammar.param}`: holds all of the reply, which leaves no room for `tools`; leave them out, or send "
            '`tool_choice` "none"',
            param=grammar.param or None,
        )
    rules = calls.instead(_answer_rule(grammar), tools, several=chat.parallel_tools)
    return _lark(rules, param=grammar.param)


def _answer_rule(grammar: Grammar) -> str:
    if len(grammar.text) > LONGEST:
        raise BadRequest(
            f"`{grammar.param}`: has {len(grammar.text)} characters; give at most {LONGEST}",
            param=grammar.param or None,
        )
    try:
        return json_rule(json.loads(grammar.text))
    except RecursionError:
        message = f"`{grammar.param}`: is nested too deeply; flatten it"
        raise BadRequest(message, param=grammar.param or None) from None


def _lark(rules: list[str], param: str = "tools") -> Grammar:
    return Grammar(kind="grammar", text="\n".join(rules) + "\n", param=param)
