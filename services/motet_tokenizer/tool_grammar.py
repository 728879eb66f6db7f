"""Build the grammar of a reply where a client's request constrains the model's tool calls.

The calls are those that `tools` parses: the format of Hermes and Qwen. The grammar is in Lark's
syntax, with JSON schemas embedded; its compiler reports the schema keywords that it does not
support.
"""

from __future__ import annotations

import json
from typing import Any

from motet_shared.errors import BadRequest
from motet_shared.messages import Chat, Grammar
from motet_shared.text.characters import characters
from motet_shared.text.grammars import LONGEST, json_rule
from motet_tokenizer.tools import CLOSE, OPEN


def grammar_of(chat: Chat, tools: list[dict[str, Any]]) -> Grammar | None:
    """Return the grammar of the reply to a chat with these tools, or None if it is unconstrained.

    Raises BadRequest if tools and constraints contradict each other.
    """
    if chat.tool_choice == "required":
        return _required(chat, tools)
    if not tools:
        return chat.grammar
    if chat.grammar is not None:
        return _calls_or(chat.grammar, chat, tools)
    if not chat.parallel_tools or any(_function(tool).get("strict") for tool in tools):
        return _calls_in_text(chat, tools)
    return None


def _required(chat: Chat, tools: list[dict[str, Any]]) -> Grammar:
    """Return a grammar of calls only, at least one; exactly one if a tool is named."""
    if not tools:
        raise BadRequest(
            "`tool_choice`: there are no tools to call; give `tools`", param="tool_choice"
        )
    if chat.tool:
        tools = [tool for tool in tools if _function(tool).get("name") == chat.tool]
        if not tools:
            raise BadRequest(
                f"`tool_choice`: there is no tool {chat.tool!r}; name one of `tools`",
                param="tool_choice",
            )
    more = "" if chat.tool or not chat.parallel_tools else ' ("\\n" call)*'
    return _lark([f"start: call{more}", f"call: {_text(OPEN)} body"], tools)


def _calls_in_text(chat: Chat, tools: list[dict[str, Any]]) -> Grammar:
    """Return a grammar of any text, with a valid call after each opening tag."""
    start = "start: (opening body)* TEXT" if chat.parallel_tools else "start: TEXT | opening body"
    return _lark([start, f"opening[lazy]: TEXT {_text(OPEN)}", r"TEXT: /(.|\n)*/"], tools)


def _calls_or(grammar: Grammar, chat: Chat, tools: list[dict[str, Any]]) -> Grammar:
    """Return a grammar of calls, or of a reply that follows `grammar`."""
    if grammar.kind != "json_schema":
        raise BadRequest(
            f"`{grammar.param}`: holds all of the reply, which leaves no room for `tools`; leave them out, or send "
            '`tool_choice` "none"',
            param=grammar.param or None,
        )
    more = ' ("\\n" call)*' if chat.parallel_tools else ""
    rules = [
        f"start: answer | call{more}",
        f"answer: {_answer_rule(grammar)}",
        f"call: {_text(OPEN)} body",
    ]
    return _lark(rules, tools, grammar.param)


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


def _lark(rules: list[str], tools: list[dict[str, Any]], param: str = "tools") -> Grammar:
    """Return `rules` plus a rule `body` for what follows an opening tag: any tool, its arguments.

    Schema keywords that no reply can be held to are refused where the tool is `strict`, and ignored
    elsewhere. Raises BadRequest for tools that are too long or nested too deeply.
    """
    if characters(tools, LONGEST) > LONGEST:
        message = f"`tools` have more than {LONGEST} characters, too many for a grammar of calls"
        raise BadRequest(f"{message}; shorten them", param="tools")
    try:
        return Grammar(kind="grammar", text=_rules(rules, tools), param=param)
    except RecursionError:
        raise BadRequest("`tools` are nested too deeply; flatten them", param="tools") from None


def _rules(rules: list[str], tools: list[dict[str, Any]]) -> str:
    names = [f"tool_{index}" for index in range(len(tools))]
    rules = [*rules, f'body: "\\n" ({" | ".join(names)}) {_text(chr(10) + CLOSE)}']
    for name, tool in zip(names, tools, strict=True):
        function = _function(tool)
        head = (
            '{"name": ' + json.dumps(function.get("name"), ensure_ascii=False) + ', "arguments": '
        )
        schema = {
            "type": "object",
            **(function.get("parameters") or {"additionalProperties": False}),
        }
        arguments = json_rule(schema, lenient=not function.get("strict"))
        rules.append(f'{name}: {_text(head)} {arguments} "}}"')
    return "\n".join(rules) + "\n"


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    return tool.get("function") or {}


def _text(text: str) -> str:
    return json.dumps(text)
