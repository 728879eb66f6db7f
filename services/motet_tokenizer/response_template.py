"""Parse replies by the `response_template` that a checkpoint's tokenizer brings, with transformers' own parser.

A response template names the fields of a message and the texts that open and close them. Text and
reasoning are passed on as they are written, stripped as the template says; a tool call once it is
complete, since only then its content is parsed. A field that cannot be parsed stays text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplate,
    ResponseTemplateField,
    load_response_template,
)

from motet_shared.errors import ConfigError
from motet_shared.messages import ToolCallDelta
from motet_shared.reasoning.reply_parser import Parts, ReplyParser
from motet_shared.tool_formats.parser import call_id, encodable

CONTENT, CALLS = "content", "tool_calls"
REASONING = ("reasoning_content", "thinking", "reasoning")


class ResponseFormat:
    """Hold the response template of one model. Raises ConfigError for an invalid one."""

    def __init__(self, template: Any, model: str, controls: Iterable[str]):
        """Set up the format. `controls`: names of the special tokens, which have no text."""
        try:
            self._template: ResponseTemplate = load_response_template(template)
        except (ValueError, TypeError, AttributeError) as error:
            message = f"model: {model!r} has an invalid response_template: {error}"
            raise ConfigError(message, param="model") from error
        for field in self._template.fields.values():
            field.optional = True  # a reply may be cut off before any field
        patterns = "\n".join(_strings([*map(_texts, self._template.fields.values())]))
        self._controls = frozenset(
            name for name in controls if name in patterns or re.escape(name) in patterns
        )

    @property
    def reasons(self) -> bool:
        return not self._template.fields.keys().isdisjoint(REASONING)

    @property
    def calls_tools(self) -> bool:
        return CALLS in self._template.fields

    def parser(
        self, prompt: Callable[[int], str], request_id: str, tools: Sequence[dict[str, Any]]
    ) -> ResponseTemplateParser:
        """Return a parser for one reply. prompt: gives the last n tokens of the prompt as text."""
        prefix = next(filter(None, map(self._turn, map(prompt, (64, 1 << 30)))), "")
        return ResponseTemplateParser(self._template, prefix, self._controls, request_id, tools)

    def _turn(self, prompt: str) -> str:
        """Return the prompt from the beginning of the assistant's turn on; empty if unknown."""
        anchors = [*self._template.start_anchor_re.finditer(prompt)]
        return prompt[anchors[-1].start() :] if anchors else ""


def _texts(field: ResponseTemplateField) -> list[Any]:
    """Return what a field is found and parsed by."""
    expressions = [one.pattern for one in (field.open_re, field.close_re) if one is not None]
    return [*expressions, field.content_args]


def _strings(value: Any) -> Iterator[str]:
    """Yield all strings in a value, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings([*value.values()])
    elif isinstance(value, list):
        for one in value:
            yield from _strings(one)


class _Parser(ResponseParser):  # type: ignore[misc]  # transformers has no types here
    """Report a field that cannot be parsed as an event, instead of raising an error."""

    def _close_current(self, events: list[dict[str, Any]]) -> None:
        field, body = self._current, self._body
        try:
            super()._close_current(events)
        except Exception:  # parsers of fields raise whatever a model's text makes them raise
            events.append({"type": "region_failed", "field": field, "text": body})
            self._reset_to_implicit()


class ResponseTemplateParser(ReplyParser):
    """Parse one reply. controls: special tokens that the template names; others have no text."""

    def __init__(
        self,
        template: ResponseTemplate,
        prefix: str,
        controls: frozenset[str],
        request_id: str,
        tools: Sequence[dict[str, Any]],
    ):
        self._parser = _Parser(template, prefix=prefix, tools=list(tools))
        self._fields: dict[str, ResponseTemplateField] = template.fields
        self._controls = controls
        self._request_id = request_id
        self._implicit = template.implicit or ""
        self._takes_calls = bool(tools)
        self._region = self._implicit
        self._body = ""  # of a region that is parsed once it is complete
        self._started = False  # the region has returned text
        self._space = ""  # white space that is returned if more follows in the region
        self._seen: set[str] = set()  # fields that have returned text
        self._index = 0  # of the next call
        self._handle(self._parser.initial_events)

    def feed(self, control: str, text: str) -> Parts:
        before = self._region
        shown = control if control in self._controls else text
        parts = self._handle(self._parser.feed(shown))
        regions = (before, self._region)
        self.hides = CONTENT not in regions
        if any(region in REASONING for region in regions):
            self.reasoning_tokens += 1
        return parts

    def flush(self, text: str) -> Parts:
        first = self._handle(self._parser.feed(text))
        last = self._handle(self._parser.finalize()[1])
        calls = [*(first.tools or ()), *(last.tools or ())]
        return Parts(first.reasoning + last.reasoning, first.text + last.text, calls or None)

    def _handle(self, events: list[dict[str, Any]]) -> Parts:
        reasoning: list[str] = []
        texts: list[str] = []
        calls: list[ToolCallDelta] = []
        for event in events:
            kind, field = event["type"], event["field"]
            if kind == "region_open":
                self._region, self._started, self._space = field, False, ""
                self._body = ""
            elif kind == "region_chunk" and event["dirty"]:
                self._body += event["text"]
            elif kind == "region_chunk":
                into = reasoning if field in REASONING else texts
                if field == CONTENT or field in REASONING:
                    into.append(self._chunk(field, event["text"]))
            elif kind == "region_close":
                if field == CALLS and not self._takes_calls:
                    texts.append(self._body)
                elif field == CALLS:
                    calls += self._calls(event["value"])
                elif field == CONTENT and not isinstance(event["value"], str):
                    texts.append(encodable(json.dumps(event["value"], ensure_ascii=False)))
                self._region = self._implicit
            elif kind == "region_failed":
                texts.append(event["text"])
                self._region = self._implicit
        return Parts("".join(reasoning), "".join(texts), calls or None)

    def _chunk(self, field: str, text: str) -> str:
        """Return text without white space around its region, unless the template keeps it."""
        spec = self._fields[field]
        if not spec.content_args.get("strip", True):
            return text
        if not self._started:
            text = text.lstrip()
        stripped = text.rstrip()
        if not stripped:
            self._space += text
            return ""
        before = self._space
        if not self._started and field in self._seen:
            before = spec.join if spec.join is not None else "\n"
        self._seen.add(field)
        self._started, self._space = True, text[len(stripped) :]
        return before + stripped

    def _calls(self, value: Any) -> list[ToolCallDelta]:
        """Return the deltas of one or several parsed calls; of none what is no call."""
        deltas = []
        for one in value if isinstance(value, list) else [value]:
            function = one.get("function") if isinstance(one, dict) else None
            if not isinstance(function, dict):
                continue
            name = function.get("name")
            if not isinstance(name, str) or not name:
                continue
            arguments = function.get("arguments") or {}
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, ensure_ascii=False)
            identity = call_id(self._request_id, self._index)
            deltas.append(
                ToolCallDelta(self._index, identity, encodable(name), encodable(arguments))
            )
            self._index += 1
            self.calls += 1
        return deltas
