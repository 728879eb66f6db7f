"""Script a model that gives bfcl-eval's own answers, which its package has beside the questions."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from motet_shared.messages import Chat, Complete, Text
from support.services.fake_services import tool_call, words

Call = tuple[str, dict[str, Any]]


class Answers:
    """Answer the questions of some categories of a data folder: the first `count` of each.

    ids: of the questions, by category.
    """

    def __init__(self, data: Path, categories: Sequence[str], count: int):
        self.ids: dict[str, list[str]] = {}
        self._known: dict[str, list[Any]] = {}  # what is to be called, by the user's message
        for category in categories:
            questions = _lines(data / f"BFCL_v4_{category}.json")[:count]
            self.ids[category] = [question["id"] for question in questions]
            answers = data / "possible_answer" / f"BFCL_v4_{category}.json"
            truth = (
                {one["id"]: one["ground_truth"] for one in _lines(answers)}
                if (answers.exists())
                else {}
            )
            for question in questions:
                found = truth.get(question["id"], [])
                turns = found if isinstance(next(iter(found), None), list) else [found]
                for messages, calls in zip(question["question"], turns, strict=True):
                    self._known[messages[-1]["content"]] = calls

    def reply(self, request: Chat | Complete) -> list[Text]:
        """Return the calls that answer the user's message; words behind their results."""
        assert isinstance(request, Chat)
        last = request.messages[-1]
        calls = self._known[last["content"]] if last["role"] == "user" else []
        tools = {tool["function"]["name"]: tool["function"] for tool in request.tools}
        made = [_call(call, tools) for call in calls]
        if not made:
            return words("None of the functions helps.")
        return [
            tool_call(json.dumps(arguments, ensure_ascii=False), name, index)
            for index, (name, arguments) in enumerate(made)
        ]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _call(answer: str | Mapping[str, Any], tools: Mapping[str, Any]) -> Call:
    """Return the call of an answer: source code of Python, or lists of what is accepted."""
    if isinstance(answer, str):
        return _parsed(answer, tools)
    ((name, accepted),) = answer.items()
    if name not in tools:
        name = name.replace(".", "_")  # as the names that are offered are written
    return name, _chosen(accepted)


def _parsed(source: str, tools: Mapping[str, Any]) -> Call:
    call = ast.parse(source, mode="eval").body
    assert isinstance(call, ast.Call)
    name = ast.unparse(call.func)
    order = list(tools[name]["parameters"]["properties"])
    arguments = {order[place]: ast.literal_eval(one) for place, one in enumerate(call.args)}
    return name, arguments | {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}


def _chosen(accepted: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """Return the first accepted value of each parameter; "" means that it may be left out."""
    return {
        name: _value(values[0]) for name, values in accepted.items() if values and values[0] != ""
    }


def _value(value: Any) -> Any:
    if isinstance(value, dict):
        return _chosen(value)
    return [_value(one) for one in value] if isinstance(value, list) else value
