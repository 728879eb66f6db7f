"""A conversation in which pictures are drawn, as the language model sees it: calls of its tool, results, pictures.

What of a reply is meant for whom is decided here (`Turn`), and what the model is asked next (`Conversation`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from motet_shared.errors import BadRequest, MotetError, Overloaded
from motet_shared.messages import Chat, End, Text, ToolCallDelta, Usage

from .chat import Outcome
from .draw import Drawn
from .see import Shown

TOOL = "draw"
MOST = 4  # pictures of one reply, and turns with calls; then the model has to do without the tool
DECLARED: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": "Draw a picture.",
        "parameters": {"type": "object", "properties": {"prompt": {"type": "string"}}, "required": ["prompt"]},
    },
}
_LOOK = "What do you see?"  # goes with a picture in the user's name: templates show pictures there, if anywhere
_SEED_MASK = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture of a conversation: what was asked for, and the file."""

    prompt: str
    data: bytes
    width: int = 0  # pixels
    height: int = 0


@dataclass(slots=True)
class Call:
    """A call of the tool, as far as it has come."""

    id: str
    arguments: str = ""

    def prompt(self) -> str:
        """BadRequest if there is none."""
        try:
            found = json.loads(self.arguments)["prompt"]
        except (ValueError, LookupError, TypeError):
            found = None
        if not isinstance(found, str) or not found.strip():
            raise BadRequest('arguments: give {"prompt": what to draw}', param="arguments")
        return found


@dataclass(slots=True)
class Turn:
    """What the model says until it stops. Calls of the tool are kept here; the rest is passed on to the caller."""

    outcome: Outcome = field(default_factory=Outcome)
    calls: list[Call] = field(default_factory=list)
    text: str = ""
    _ours: dict[int, Call] = field(default_factory=dict)  # by the index of the call
    _theirs: dict[int, int] = field(default_factory=dict)  # of the caller's tools: the index that the caller knows

    @property
    def calls_others(self) -> bool:
        """Whether it is the caller's turn now."""
        return bool(self._theirs)

    def heard(self, batch: list[Text]) -> list[Text]:
        """A batch as the caller gets it."""
        self.text += "".join([item.text for item in batch])
        if not any(item.tools for item in batch):
            return batch
        return [msgspec.structs.replace(item, tools=self._sorted(item.tools or []) or None) for item in batch]

    def _sorted(self, pieces: list[ToolCallDelta]) -> list[ToolCallDelta]:
        """Those of the caller's tools, numbered as if there were no others."""
        passed = []
        for piece in pieces:
            if piece.name == TOOL:
                self._ours[piece.index] = Call(piece.id)
                self.calls.append(self._ours[piece.index])
            elif piece.name:
                self._theirs[piece.index] = len(self._theirs)
            if piece.index in self._ours:
                self._ours[piece.index].arguments += piece.arguments
            else:
                passed.append(msgspec.structs.replace(piece, index=self._theirs[piece.index]))
        return passed


class Conversation:
    """It grows with what is drawn. `request` and `pictures` are what the model is asked now."""

    def __init__(self, request: Chat, pictures: Sequence[Shown], outcome: Outcome, *, sees: bool):
        self.request = msgspec.structs.replace(request, tools=[*request.tools, DECLARED], tool_choice="auto")
        self.pictures = list(pictures)
        self._outcome, self._sees = outcome, sees
        self._results: list[dict[str, Any]] = []  # of this turn
        self._shown: list[Shown] = []  # in this turn
        self._drawn = self._turns = 0
        self._id = request.request_id
        self._usage = Usage()
        self._timing: dict[str, float] = {}

    def next_seed(self) -> int:
        """That of the next picture. Overloaded after MOST of them."""
        if self._drawn == MOST:
            raise Overloaded(f"{MOST} pictures were drawn; that is enough")
        self._drawn += 1
        return (self.request.sampling.seed + self._drawn - 1) & _SEED_MASK

    def shows(self, call: Call, drawn: Drawn) -> Drawing:
        """The picture that a call has made is there."""
        made = Drawing(call.prompt(), drawn.data, drawn.width, drawn.height)
        self._results.append(_result(call.id, _told(made.prompt)))
        if self._sees:
            self._shown.append(Shown(made.data))
        return made

    def tells(self, call: Call, error: MotetError) -> None:
        """No picture came of a call."""
        reason = error.message if isinstance(error, BadRequest) else error.code
        self._results.append(_result(call.id, {"error": reason}))

    def is_over(self, turn: Turn) -> bool:
        """Whether the model has said all; else it is asked to go on."""
        end = self._note(turn.outcome)
        most = self.request.max_tokens
        left = None if most is None else most - (end.usage or Usage()).completion_tokens
        waits = bool(turn.calls) and not turn.calls_others and end.status != "length"  # for what became of its calls
        if waits and (left is None or left > 0) and self._turns <= MOST:
            self._go_on(turn, left)
            return False
        status = "length" if waits else end.status
        self._outcome.end = End(end.stream, end.seq, status, self._usage, self._timing)
        return True

    def _note(self, outcome: Outcome) -> End:
        """What a turn came to goes into the whole."""
        end = outcome.end or End(0, 0)
        self._outcome.instance = outcome.instance
        self._outcome.moves += outcome.moves
        self._usage = _sum(self._usage, end.usage or Usage())
        for stage, seconds in end.timing.items():
            self._timing[stage] = self._timing.get(stage, 0.0) + seconds
        return end

    def _go_on(self, turn: Turn, left: int | None) -> None:
        self._turns += 1
        looks = [_look(len(self._shown))] if self._shown else []
        calls = [_call(call.id, _prompt_or_empty(call)) for call in turn.calls]
        spoken = {"role": "assistant", "content": turn.text, "tool_calls": calls}
        self.request = msgspec.structs.replace(
            self.request,
            messages=[*self.request.messages, spoken, *self._results, *looks],
            tools=[tool for tool in self.request.tools if tool is not DECLARED or max(self._drawn, self._turns) < MOST],
            max_tokens=left,
            request_id=f"{self._id}.{self._turns}",  # ids of calls come from it
        )
        self.pictures += self._shown
        self._results, self._shown = [], []


def is_told(error: MotetError) -> bool:
    """Whether an error is the model's to deal with: it may pass, or is one of the model's own words."""
    return error.retryable or error.param in ("prompt", "arguments")


def remembered(prompts: Sequence[str], *, sees: bool) -> list[dict[str, Any]]:
    """What was drawn in an earlier reply as messages: the model's calls, their results, and a look, if it `sees`.

    The same as in the conversation in which it was drawn, so that its prefix is still known.
    """
    calls = [_call(_key(prompt), prompt) for prompt in prompts]
    results = [_result(_key(prompt), _told(prompt)) for prompt in prompts]
    looks = [_look(len(prompts))] if sees else []
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *results, *looks]


def _call(name: str, prompt: str) -> dict[str, Any]:
    arguments = json.dumps({"prompt": prompt} if prompt else {}, ensure_ascii=False)
    return {"id": name, "type": "function", "function": {"name": TOOL, "arguments": arguments}}


def _prompt_or_empty(call: Call) -> str:
    try:
        return call.prompt()
    except BadRequest:
        return ""


def _result(call: str, told: dict[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "name": TOOL, "content": json.dumps(told, ensure_ascii=False)}


def _told(prompt: str) -> dict[str, Any]:
    return {"images": [_key(prompt)], "prompt": prompt}


def _look(count: int) -> dict[str, Any]:
    return {"role": "user", "content": [*[{"type": "image"}] * count, {"type": "text", "text": _LOOK}]}


def _key(prompt: str) -> str:
    """A name of what was drawn: in a later request the same as now."""
    return hashlib.blake2b(prompt.encode(), digest_size=3).hexdigest()


def _sum(one: Usage, other: Usage) -> Usage:
    return Usage(**{name: getattr(one, name) + getattr(other, name) for name in Usage.__struct_fields__})
