"""Present a chat in which pictures are drawn to the language model: tool calls, results, pictures.

`Turn` splits a reply into calls of the drawing tool and items for the caller; `Conversation` builds
the next request to the model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from motet_pipelines.chat.chat import Outcome
from motet_pipelines.chat.vision import InputMedia
from motet_shared.errors import BadRequest, MotetError, Overloaded
from motet_shared.messages import Chat, End, Text, ToolCallDelta, Usage

from .draw import Drawn

TOOL = "draw"
MAX_PICTURES = 4  # limit of pictures per reply and of turns with calls; then the tool is withdrawn
DRAW_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": "Draw a picture.",
        "parameters": {
            "type": "object",
            "properties": {"prompt": {"type": "string"}},
            "required": ["prompt"],
        },
    },
}
_QUESTION = (
    "What do you see?"  # sent with a picture as a user message, where every template accepts one
)
_SEED_MASK = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Drawing:
    """Picture of a conversation: its prompt and its file."""

    prompt: str
    data: bytes
    width: int = 0  # pixels
    height: int = 0


@dataclass(slots=True)
class Call:
    """Call of the drawing tool, as far as it was received."""

    id: str
    arguments: str = ""

    def prompt(self) -> str:
        """Return the prompt of the call. Raises BadRequest if the arguments hold none."""
        try:
            found = json.loads(self.arguments)["prompt"]
        except (ValueError, LookupError, TypeError):
            found = None
        if not isinstance(found, str) or not found.strip():
            raise BadRequest('arguments: give {"prompt": what to draw}', param="arguments")
        return found


@dataclass(slots=True)
class Turn:
    """Collect one turn of the model: keep calls of the drawing tool, pass everything else on."""

    outcome: Outcome = field(default_factory=Outcome)
    calls: list[Call] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    _drawing_calls: dict[int, Call] = field(default_factory=dict)  # by the index of the call
    # Calls of the caller's tools: the model's index to the caller's.
    _client_calls: dict[int, int] = field(default_factory=dict)

    @property
    def calls_others(self) -> bool:
        """Return True if the model called tools of the caller, which has to answer next."""
        return bool(self._client_calls)

    def receive(self, batch: list[Text]) -> list[Text]:
        """Record a batch and return it without the pieces of drawing calls."""
        self.text += "".join([item.text for item in batch])
        self.reasoning += "".join([item.reasoning for item in batch])
        if not any(item.tools for item in batch):
            return batch
        return [
            msgspec.structs.replace(item, tools=self._split(item.tools or []) or None)
            for item in batch
        ]

    def _split(self, pieces: list[ToolCallDelta]) -> list[ToolCallDelta]:
        """Return the pieces that call the caller's tools, renumbered without drawing calls."""
        kept = []
        for piece in pieces:
            if piece.name == TOOL:
                self._drawing_calls[piece.index] = Call(piece.id)
                self.calls.append(self._drawing_calls[piece.index])
            elif piece.name:
                self._client_calls[piece.index] = len(self._client_calls)
            if piece.index in self._drawing_calls:
                self._drawing_calls[piece.index].arguments += piece.arguments
            else:
                kept.append(msgspec.structs.replace(piece, index=self._client_calls[piece.index]))
        return kept


class Conversation:
    """Keep the growing chat; `request` and `pictures` are the next request to the model."""

    def __init__(
        self,
        request: Chat,
        pictures: Sequence[InputMedia],
        outcome: Outcome,
        *,
        accepts_images: bool,
    ):
        self.request = msgspec.structs.replace(
            request, tools=[*request.tools, DRAW_TOOL], tool_choice="auto"
        )
        self.pictures = list(pictures)
        self._outcome, self._sees = outcome, accepts_images
        self._results: list[dict[str, Any]] = []  # tool messages of this turn
        self._shown: list[InputMedia] = []  # pictures that this turn adds
        self._drawn = self._turns = 0
        self._id = request.request_id
        self._usage = Usage()
        self._timing: dict[str, float] = {}

    def next_seed(self) -> int:
        """Return the seed of the next picture. Raises Overloaded after MAX_PICTURES of them."""
        if self._drawn == MAX_PICTURES:
            raise Overloaded(f"{MAX_PICTURES} pictures were drawn; that is enough")
        self._drawn += 1
        return (self.request.sampling.seed + self._drawn - 1) & _SEED_MASK

    def add_picture(self, call: Call, drawn: Drawn) -> Drawing:
        """Add the picture that a call produced, and return it."""
        drawing = Drawing(call.prompt(), drawn.data, drawn.width, drawn.height)
        self._results.append(_result(call.id, _result_fields(drawing.prompt)))
        if self._sees:
            self._shown.append(InputMedia(drawing.data))
        return drawing

    def add_error(self, call: Call, error: MotetError) -> None:
        """Add the error of a call that produced no picture."""
        reason = error.message if isinstance(error, BadRequest) else error.code
        self._results.append(_result(call.id, {"error": reason}))

    def finish_turn(self, turn: Turn) -> bool:
        """Return True if the model has finished; else prepare its next request."""
        end = self._note(turn.outcome)
        most = self.request.max_tokens
        left = None if most is None else most - (end.usage or Usage()).completion_tokens
        waits = (
            bool(turn.calls) and not turn.calls_others and end.status != "length"
        )  # for the results of its drawing calls
        if waits and (left is None or left > 0) and self._turns <= MAX_PICTURES:
            self._continue(turn, left)
            return False
        status = "length" if waits else end.status
        self._outcome.end = End(end.stream, end.seq, status, self._usage, self._timing)
        return True

    def _note(self, outcome: Outcome) -> End:
        """Add the usage, timing and moves of a turn to the totals; return the end of the turn."""
        end = outcome.end or End(0, 0)
        self._outcome.instance = outcome.instance
        self._outcome.moves += outcome.moves
        self._usage = _sum(self._usage, end.usage or Usage())
        for stage, seconds in end.timing.items():
            self._timing[stage] = self._timing.get(stage, 0.0) + seconds
        return end

    def _continue(self, turn: Turn, left: int | None) -> None:
        self._turns += 1
        question = [_question(len(self._shown))] if self._shown else []
        calls = [_call(call.id, _prompt_or_empty(call)) for call in turn.calls]
        reply = {"role": "assistant", "content": turn.text, "tool_calls": calls}
        if turn.reasoning:
            reply["reasoning_content"] = turn.reasoning
        self.request = msgspec.structs.replace(
            self.request,
            messages=[*self.request.messages, reply, *self._results, *question],
            tools=[
                tool
                for tool in self.request.tools
                if tool is not DRAW_TOOL or max(self._drawn, self._turns) < MAX_PICTURES
            ],
            max_tokens=left,
            request_id=f"{self._id}.{self._turns}",  # call ids derive from it
        )
        self.pictures += self._shown
        self._results, self._shown = [], []


def is_reported(error: MotetError) -> bool:
    """Return True if the model gets the error: it is retryable or about the call's arguments."""
    return error.retryable or error.param in ("prompt", "arguments")


def remembered(prompts: Sequence[str], *, accepts_images: bool) -> list[dict[str, Any]]:
    """Return the messages for the pictures of an earlier reply: tool calls and their results.

    accepts_images: add the message that shows the pictures to the model.
    They equal those of the conversation in which the pictures were drawn, so its prefix stays
    cached.
    """
    calls = [_call(_key(prompt), prompt) for prompt in prompts]
    results = [_result(_key(prompt), _result_fields(prompt)) for prompt in prompts]
    question = [_question(len(prompts))] if accepts_images else []
    return [{"role": "assistant", "content": "", "tool_calls": calls}, *results, *question]


def _call(name: str, prompt: str) -> dict[str, Any]:
    arguments = json.dumps({"prompt": prompt} if prompt else {}, ensure_ascii=False)
    return {"id": name, "type": "function", "function": {"name": TOOL, "arguments": arguments}}


def _prompt_or_empty(call: Call) -> str:
    try:
        return call.prompt()
    except BadRequest:
        return ""


def _result(call: str, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "role": "tool",
        "tool_call_id": call,
        "name": TOOL,
        "content": json.dumps(fields, ensure_ascii=False),
    }


def _result_fields(prompt: str) -> dict[str, Any]:
    return {"images": [_key(prompt)], "prompt": prompt}


def _question(count: int) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [*[{"type": "image"}] * count, {"type": "text", "text": _QUESTION}],
    }


def _key(prompt: str) -> str:
    """Return a name for a drawing that is the same in every request."""
    return hashlib.blake2b(prompt.encode(), digest_size=3).hexdigest()


def _sum(one: Usage, other: Usage) -> Usage:
    return Usage(
        **{name: getattr(one, name) + getattr(other, name) for name in Usage.__struct_fields__}
    )
