"""Reasoning between tags: `<think>`, the reasoning, `</think>`, and the answer.

The chat template may write the opening tag (DeepSeek-R1), or both tags, where the model is not to
think (Qwen3 with `enable_thinking=false`). White space around the reasoning and line breaks before
the answer belong to the format. Some models write tags around the answer too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from motet_shared.tool_formats.tool import Tool

from .reasoning_format import Beginning, Message, ReasoningFormat
from .reply_parser import Parts, ReplyParser

_LINE_BREAKS = 4  # most line breaks between reasoning and answer, where a grammar holds the answer


@dataclass(frozen=True, kw_only=True)
class ThinkTags(ReasoningFormat):
    """A format of reasoning between `opening` and `closing`.

    repeats: reasoning may also stand behind text, as the tags are control tokens, which no text
    has. limits: texts that end the reasoning as `closing` does, but belong to what follows. answer:
    tags around the answer, if there are any. parts: templates take reasoning as a part of the
    content, unless they read `reasoning_content`.
    """

    name: str
    markers: tuple[str, ...]
    opening: str
    closing: str
    repeats: bool = False
    limits: tuple[str, ...] = ()
    answer: tuple[str, str] | None = None
    parts: bool = False

    @property
    def tags(self) -> tuple[str, ...]:
        return (self.opening, self.closing, *(self.answer or ()))

    def beginning(self, prompt: str) -> Beginning:
        end = prompt.rstrip()
        if end.endswith(self.opening):
            return Beginning.OPEN
        return Beginning.CLOSED if end.endswith(self.closing) else Beginning.OPTIONAL

    def parser(
        self, beginning: Beginning, request_id: str = "", tools: Sequence[Tool] = ()
    ) -> ReplyParser | None:
        if beginning is Beginning.CLOSED and not self.repeats and self.answer is None:
            return None
        return ThinkTagParser(self, beginning)

    def history(self, message: Message, template: str) -> Message:
        """Return `message` with its reasoning as a part of the content.

        It is unchanged unless `parts` is set, or if the template reads `reasoning_content`.
        """
        reasoning = message.get("reasoning_content")
        if not (self.parts and reasoning) or "reasoning_content" in template:
            return message
        content = message.get("content") or ""
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        return {**message, "content": [{"type": "thinking", "thinking": reasoning}, *parts]}

    def frame(self, beginning: Beginning, *, calls: bool = False) -> str:
        """Return optional reasoning before the answer; none where the template has closed it."""
        opening, closing = map(json.dumps, self.answer or ("", ""))
        answer = (
            f"({opening} LINES @answer LINES {closing} | @answer)" if self.answer else "@answer"
        )
        lines = rf"LINES: /\n{{0,{_LINE_BREAKS}}}/"
        if beginning is Beginning.CLOSED:
            return f"start: {answer}\n{lines}\n" if self.answer else ""
        optional = "?" if beginning is Beginning.OPTIONAL else ""
        head = (
            rf"\s{{0,{_LINE_BREAKS}}}{re.escape(self.opening)}"
            if beginning is Beginning.OPTIONAL
            else ""
        )
        thought = f"{head}(.|\\n)*{re.escape(self.closing)}".replace("/", r"\/")
        return (
            f"start: reasoning{optional} {answer}\n"
            f"reasoning: thought LINES\nthought[lazy]: /{thought}/\n{lines}\n"
        )


class _State(Enum):
    START = "start"  # nothing but white space or a part of the opening tag
    REASONING = "reasoning"
    BETWEEN = "between"  # behind the closing tag, before the first character of the answer
    TEXT = "text"


class ThinkTagParser(ReplyParser):
    """Parse one reply of a `ThinkTags` format."""

    def __init__(self, tags: ThinkTags, beginning: Beginning):
        self._tags = tags
        self._buffer = ""  # text not yet decided
        self._fresh = True  # no reasoning of this block has been returned
        self._undecided = 0  # tokens before it is known whether they begin the reasoning
        states = {Beginning.OPEN: _State.REASONING, Beginning.CLOSED: _State.BETWEEN}
        self._state = states.get(beginning, _State.START)
        self._in_answer = False  # behind the tag that opens the answer
        self._reasoning: list[str] = []
        self._text: list[str] = []

    @property
    def is_done(self) -> bool:
        tags = self._tags
        return (
            self._state is _State.TEXT
            and not self._buffer
            and not (tags.repeats or (tags.answer and self._in_answer))
        )

    def feed(self, control: str, text: str) -> Parts:
        reasons = self._state is _State.REASONING
        self._buffer += text
        while self._advance():
            reasons = reasons or self._state is _State.REASONING
        if reasons:
            self.reasoning_tokens += 1 + self._undecided
            self._undecided = 0
        elif self._state is _State.START:
            self._undecided += 1
        is_dropped = bool(text) and not self._buffer and not any(self._text)
        self.hides = reasons or is_dropped
        return self._take()

    def flush(self, text: str) -> Parts:
        self._buffer += text
        while self._advance():
            pass
        rest, self._buffer = self._buffer, ""
        if self._state is _State.REASONING:
            self._reasoning.append(rest.rstrip())
        elif self._state is not _State.BETWEEN:
            self._text.append(rest)
        return self._take()

    def _take(self) -> Parts:
        parts = Parts("".join(self._reasoning), "".join(self._text))
        self._reasoning, self._text = [], []
        return parts

    # -------------------------------------------------------------------------------- transitions
    def _advance(self) -> bool:
        """Make one transition. Return False if more text is needed for the next."""
        if self._state is _State.START:
            return self._start()
        if self._state is _State.REASONING:
            return self._read_reasoning()
        if self._state is _State.BETWEEN:
            return self._begin_answer()
        return self._read_text()

    def _start(self) -> bool:
        rest = self._buffer.lstrip()
        if rest.startswith(self._tags.opening):
            self._buffer, self._state = rest[len(self._tags.opening) :], _State.REASONING
            return True
        if self._tags.opening.startswith(rest):
            return False
        self._state = _State.BETWEEN if self._tags.answer else _State.TEXT
        return True

    def _read_reasoning(self) -> bool:
        if self._fresh and not self._skip_opening():
            return False
        end, tag = self._find_end()
        if end >= 0:
            self._reasoning.append(self._buffer[:end].rstrip())
            self._buffer = self._buffer[end + len(tag) :]
            self._fresh, self._state = True, _State.BETWEEN
            return True
        certain = _certain(self._buffer, (self._tags.closing, *self._tags.limits))
        if certain:
            self._reasoning.append(self._buffer[:certain])
            self._buffer, self._fresh = self._buffer[certain:], False
        return False

    def _skip_opening(self) -> bool:
        """Drop white space, and tags that the model repeats. Return False if more may follow."""
        self._buffer = self._buffer.lstrip()
        while self._buffer.startswith(self._tags.opening):
            self._buffer = self._buffer[len(self._tags.opening) :].lstrip()
        return not self._tags.opening.startswith(self._buffer)

    def _find_end(self) -> tuple[int, str]:
        """Return where the reasoning ends, and the tag to drop there; -1 if it goes on."""
        closing = self._tags.closing
        ends = [(at, "") for end in self._tags.limits if (at := self._buffer.find(end)) >= 0]
        if (at := self._buffer.find(closing)) >= 0:
            ends.append((at, closing))
        return min(ends, default=(-1, ""))

    def _begin_answer(self) -> bool:
        """Drop line breaks, and the opening tag of an answer."""
        rest = self._buffer.lstrip("\n")
        if not rest:
            self._buffer = ""
            return False
        if self._tags.answer and not self._in_answer:
            if rest.startswith(self._tags.answer[0]):
                self._buffer, self._in_answer = rest[len(self._tags.answer[0]) :], True
                return True
            if self._tags.answer[0].startswith(rest):
                self._buffer = rest
                return False
        self._buffer, self._state = rest, _State.TEXT
        return True

    def _read_text(self) -> bool:
        tags = self._tags
        if self._in_answer and tags.answer:
            return self._read_until(tags.answer[1], _State.TEXT)
        if tags.repeats:
            return self._read_until(tags.opening, _State.REASONING)
        self._text.append(self._buffer)
        self._buffer = ""
        return False

    def _read_until(self, tag: str, state: _State) -> bool:
        """Return text up to `tag`, which is dropped with the line breaks before it."""
        before, found, after = self._buffer.partition(tag)
        cut = len(before.rstrip("\n")) if found else _certain(before, (tag,), "\n")
        self._text.append(before[:cut])
        self._buffer = after if found else before[cut:]
        if found:
            self._state, self._in_answer = state, False
        return bool(found)


def _certain(text: str, tags: Sequence[str], space: str | None = None) -> int:
    """Return how many characters are certainly no part of a tag, or of white space before it."""
    starts = [
        at
        for tag in tags
        for at in range(max(0, len(text) - len(tag) + 1), len(text))
        if tag.startswith(text[at:])
    ]
    return len(text[: min(starts, default=len(text))].rstrip(space))
