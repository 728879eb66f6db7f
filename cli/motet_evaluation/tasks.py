"""Read tasks (questions with one right answer each) from JSON lines, and score answers.

A line is `{"question": …, "answer": …}`, or `{"messages": [{"role": …, "content": …}], "answer":
…}`; `category` and `tools`, as chat templates take them, are optional. An answer is right if it
equals the text, ignoring white space at its ends; one with `<tool_call>` is right if the calls are
the same JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from motet_shared.errors import ConfigError
from motet_shared.tool_formats.hermes import HERMES, OPENING


@dataclass(frozen=True, kw_only=True)
class Task:
    """Hold a prompt with its right answer.

    messages, tools: the prompt, as chat templates take it.
    category: group for which accuracy is reported.
    """

    messages: tuple[Mapping[str, Any], ...]
    answer: str
    category: str = "all"
    tools: tuple[Mapping[str, Any], ...] = ()

    def is_right(self, reply: str) -> bool:
        """Return True if the reply is the right answer, by text or by its tool calls."""
        if OPENING not in self.answer:
            return reply.strip() == self.answer.strip()
        return _calls(reply) == _calls(self.answer)


def read_tasks(path: Path) -> list[Task]:
    """Return the tasks of a file. Raises ConfigError that names file, line and field."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--tasks: {str(path)!r} cannot be read: {error}; give a file of JSON lines",
            param="--tasks",
        ) from error
    tasks = [
        _task(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not tasks:
        raise ConfigError(
            f"--tasks: {str(path)!r} is empty; give at least one question", param="--tasks"
        )
    return tasks


def _task(where: str, line: str) -> Task:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            f"{where}: {error}; give one JSON object per line", param="--tasks"
        ) from error
    if not isinstance(fields, dict) or not isinstance(fields.get("answer"), str):
        raise ConfigError(f"{where}: answer is not a text; give a string", param="answer")
    messages = fields.get("messages")
    if messages is None and isinstance(fields.get("question"), str):
        messages = [{"role": "user", "content": fields["question"]}]
    if (
        not isinstance(messages, list)
        or not messages
        or not all(_is_message(message) for message in messages)
    ):
        raise ConfigError(
            f"{where}: messages: give a question, or messages with role and content each",
            param="messages",
        )
    category, tools = fields.get("category", "all"), fields.get("tools") or ()
    if not isinstance(category, str) or not isinstance(tools, list | tuple):
        raise ConfigError(f"{where}: category, tools: give a string and a list", param="category")
    return Task(
        messages=tuple(messages), answer=fields["answer"], category=category, tools=tuple(tools)
    )


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and {"role", "content"} <= message.keys()


def _calls(text: str) -> list[tuple[str, Any]] | None:
    """Return name and arguments of each tool call of a reply; None if arguments are not JSON."""
    _, calls = HERMES.parse(text)
    try:
        return [(name, json.loads(arguments)) for name, arguments in calls]
    except ValueError:
        return None
