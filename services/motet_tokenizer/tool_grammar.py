"""What a reply must look like where a client promises itself something of the model's tool calls.

The calls are those that `tools` parses: Hermes' and Qwen's format. The grammar is in Lark's syntax; JSON schemas are
embedded in it, and whoever compiles it says which of their keywords it does not know.
"""

from __future__ import annotations

import json
from typing import Any

from motet_shared.errors import BadRequest
from motet_shared.grammars import json_rule
from motet_shared.messages import Chat, Grammar
from motet_tokenizer.tools import CLOSE, OPEN


def grammar_of(chat: Chat, tools: list[dict[str, Any]]) -> Grammar | None:
    """Of the reply to a chat with these tools; None if the model may say what it likes. Raises BadRequest."""
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
    """Nothing but calls, one at least; exactly one of the tool that is named."""
    if not tools:
        raise BadRequest("`tool_choice`: there are no tools to call; give `tools`", param="tool_choice")
    if chat.tool:
        tools = [tool for tool in tools if _function(tool).get("name") == chat.tool]
        if not tools:
            raise BadRequest(f"`tool_choice`: there is no tool {chat.tool!r}; name one of `tools`", param="tool_choice")
    more = "" if chat.tool or not chat.parallel_tools else ' ("\\n" call)*'
    return _lark([f"start: call{more}", f"call: {_text(OPEN)} body"], tools)


def _calls_in_text(chat: Chat, tools: list[dict[str, Any]]) -> Grammar:
    """Any text; from an opening tag on, a call."""
    start = "start: (opening body)* TEXT" if chat.parallel_tools else "start: TEXT | opening body"
    return _lark([start, f"opening[lazy]: TEXT {_text(OPEN)}", r"TEXT: /(.|\n)*/"], tools)


def _calls_or(grammar: Grammar, chat: Chat, tools: list[dict[str, Any]]) -> Grammar:
    """Calls, or a reply of the wanted shape."""
    if grammar.kind != "json_schema":
        raise BadRequest(
            f"`{grammar.param}`: holds all of the reply, which leaves no room for `tools`; leave them out, or send "
            '`tool_choice` "none"',
            param=grammar.param or None,
        )
    more = ' ("\\n" call)*' if chat.parallel_tools else ""
    rules = [
        f"start: answer | call{more}",
        f"answer: {json_rule(json.loads(grammar.text))}",
        f"call: {_text(OPEN)} body",
    ]
    return _lark(rules, tools, grammar.param)


def _lark(rules: list[str], tools: list[dict[str, Any]], param: str = "tools") -> Grammar:
    """`rules`, and a rule `body` for what comes after an opening tag: any tool, each with its own arguments.

    Keywords of a schema that no reply can be held to are refused where the tool is `strict`, and ignored elsewhere.
    """
    names = [f"tool_{index}" for index in range(len(tools))]
    rules = [*rules, f'body: "\\n" ({" | ".join(names)}) {_text(chr(10) + CLOSE)}']
    for name, tool in zip(names, tools, strict=True):
        function = _function(tool)
        head = '{"name": ' + json.dumps(function.get("name"), ensure_ascii=False) + ', "arguments": '
        schema = {"type": "object", **(function.get("parameters") or {"additionalProperties": False})}
        arguments = json_rule(schema, lenient=not function.get("strict"))
        rules.append(f'{name}: {_text(head)} {arguments} "}}"')
    return Grammar(kind="grammar", text="\n".join(rules) + "\n", param=param)


def _function(tool: dict[str, Any]) -> dict[str, Any]:
    return tool.get("function") or {}


def _text(text: str) -> str:
    return json.dumps(text)
