"""Send requests as messages to /v1/chat/completions, for servers that take no token ids.

The tokenizer sends the chat beside its tokens (`messages.Generate.chat`); the server's text comes
back in tokens that spell it. Tools, log-probabilities, raw prompts and replies that began elsewhere
are refused, because the route cannot express them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from motet_engines.continuation import seed_of
from motet_engines.engine import Features, StepOutput
from motet_shared.errors import BadRequest, UnsupportedParameter
from motet_shared.messages import Chat, Generate

from .completions import response_format, sampling_fields
from .dialects import ServerDialect
from .route import Ending, read_event
from .text_tokens import TextTokens


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Any = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class ChatRoute:
    """Send chats as they came from the client."""

    name = "chat"
    path = "/chat/completions"

    def __init__(self, dialect: ServerDialect, model: str, text: TextTokens):
        self._dialect = dialect
        self._model = model
        self._text = text
        self.features = Features(
            sampling=dialect.sampling,
            grammars=frozenset({"json_schema"}),
            frames=True,  # the server puts reasoning before the answer itself
            continues=False,
            logprobs=-1,
            raw_prompts=False,
        )

    def body(self, request: Generate) -> dict[str, Any]:
        chat = request.chat
        if chat is None:
            raise BadRequest("chat: is missing; the tokenizer is older than this engine")
        _check_chat(chat)
        body: dict[str, Any] = {
            "model": self._model,
            "messages": chat.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **sampling_fields(request.sampling, self._dialect, 0),
            "seed": seed_of(request),
        }
        # What the client left out, the server knows better: its model may refuse other values.
        for name in request.sampling.left_out:
            body.pop(name, None)
        if chat.max_tokens is not None:
            body[self._dialect.max_tokens] = request.sampling.max_tokens
        if chat.reasoning_effort:
            body["reasoning_effort"] = chat.reasoning_effort
        if chat.grammar is not None:
            body |= response_format(chat.grammar)
        return body

    def reply(self, request: Generate) -> ChatReply:
        return ChatReply(self._text)


def _check_chat(chat: Chat) -> None:
    unsupported = {
        "tools": bool(chat.tools) and chat.tool_choice != "none",
        "messages": bool(chat.images),
        "add_generation_prompt": not chat.add_generation_prompt,
        "continue_final_message": chat.continue_final_message,
        "chat_template_kwargs": bool(chat.template_options),
    }
    for name, is_given in unsupported.items():
        if is_given:
            raise UnsupportedParameter(
                f"`{name}`: the engine is reached through its chats, which leaves no place for it"
                " here; leave it out",
                param=name,
            )


class ChatReply:
    """Read the text of one reply."""

    def __init__(self, text: TextTokens):
        self._text = text
        self._ending = Ending()

    def feed(self, data: bytes) -> StepOutput | None:
        event = read_event(_decode, data)
        choice = event.choices[0] if event.choices else _Choice()
        self._ending.note(choice.finish_reason, event.usage)
        ids = self._text.spell(choice.delta.content or "")
        return StepOutput(ids) if ids else None

    def end(self) -> StepOutput:
        return self._ending.output()
