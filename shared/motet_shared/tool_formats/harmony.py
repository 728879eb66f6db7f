"""Harmony's tool calls: the tokens of the format, and the grammar of a reply that may be a call.

<|channel|>commentary to=functions.draw <|constrain|>json<|message|>{"shape": "circle"}<|call|>

(OpenAI, "harmony response format", 2025.) A reply holds one call. `reasoning.harmony` parses whole
replies, calls included.
"""

from __future__ import annotations

from collections.abc import Sequence

from motet_shared.text.grammars import json_rule

from .tool import Tool
from .tool_format import ToolFormat, alternatives, literal

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
FUNCTIONS = "functions."
# The header of an answer in a grammar, where special tokens stand without quotes.
FINAL = f'{CHANNEL} "final" (" " {CONSTRAIN} "json")? {MESSAGE}'
_TYPE = f'(" " {CONSTRAIN} "json" | " json")?'
_TEXT = r"TEXT: /(.|\n)*/"


class HarmonyCallGrammar:
    """Write replies that are a call or a message on the channel `final`."""

    def required(self, tools: Sequence[Tool], *, several: bool) -> list[str]:
        return ["start: call", *self._calls(tools)]

    def in_text(self, tools: Sequence[Tool], *, several: bool) -> list[str]:
        return [f"start: {FINAL} TEXT | call", _TEXT, *self._calls(tools)]

    def instead(self, answer: str, tools: Sequence[Tool], *, several: bool) -> list[str]:
        return [f"start: {FINAL} answer | call", f"answer: {answer}", *self._calls(tools)]

    def _calls(self, tools: Sequence[Tool]) -> list[str]:
        names = [f"tool_{index}" for index in range(len(tools))]
        return [
            f"call: {alternatives(names)}",
            *map(_call_rule, names, tools),
        ]


def _call_rule(rule: str, tool: Tool) -> str:
    """Return the rule of a call, with its recipient before or behind the channel."""
    recipient = f"to={FUNCTIONS}{tool.name}"
    behind = f"{CHANNEL} {literal(f'commentary {recipient}')} {_TYPE}"
    before = f'{literal(f" {recipient}")} {CHANNEL} "commentary" {_TYPE}'
    arguments = json_rule(dict(tool.schema), lenient=not tool.strict)
    return f"{rule}: ({behind} | {before}) {MESSAGE} {arguments}"


HARMONY = ToolFormat(
    name="harmony",
    markers=(CHANNEL, MESSAGE, FUNCTIONS),
    tags=(),
    parser=None,
    grammar=HarmonyCallGrammar(),
)
