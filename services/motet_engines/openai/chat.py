"""Send requests as messages to /v1/chat/completions: pictures, and all that takes no token ids.

The tokenizer sends the chat beside its tokens (`messages.Generate.chat`); the server's text comes
back in tokens that spell it, unless the server returns ids. Tools, log-probabilities, raw prompts and
replies that began elsewhere are refused, because the route cannot express them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from motet_engines.continuation import seed_of
from motet_engines.engine import Features, StepOutput
from motet_engines.pictures import Picture
from motet_shared.errors import BadRequest, UnsupportedParameter
from motet_shared.messages import Chat, Generate, Sampling

from .completions import response_format, sampling_fields
from .dialects import ServerDialect
from .picture_messages import messages_of
from .route import Ending, cut_at_stop, read_event
from .text_tokens import TextTokens


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
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

    def body(self, request: Generate, pictures: Sequence[Picture] = ()) -> dict[str, Any]:
        chat = request.chat
        if chat is None:
            raise BadRequest("chat: is missing; the tokenizer is older than this engine")
        _check_chat(chat)
        body: dict[str, Any] = {
            "model": self._model,
            "messages": messages_of(chat, pictures, self._dialect),
            "stream": True,
            "stream_options": {"include_usage": True},
            **sampling_fields(request.sampling, self._dialect, 0),
            "seed": seed_of(request),
        }
        if self._dialect.chat_ids:
            body["return_token_ids"] = True
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
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
        has_pictures = request.chat is not None and bool(request.chat.images)
        return ChatReply(request.sampling, self._text, counts_prompt=has_pictures)


def _check_chat(chat: Chat) -> None:
    unsupported = {
        "tools": bool(chat.tools) and chat.tool_choice != "none",
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
    """Read one reply.

    counts_prompt: the server alone knows the length of the prompt, whose pictures it has expanded.
    """

    def __init__(self, sampling: Sampling, text: TextTokens, *, counts_prompt: bool):
        self._stops = frozenset(sampling.stop_token_ids)
        self._text = text
        self._counts_prompt = counts_prompt
        self._ending = Ending()

    def feed(self, data: bytes) -> StepOutput | None:
        event = read_event(_decode, data)
        choice = event.choices[0] if event.choices else _Choice()
        self._ending.note(choice.finish_reason, event.usage)
        ids = choice.token_ids
        if ids is None:
            ids = self._text.spell(choice.delta.content or "")
        if not ids:
            return None
        kept = cut_at_stop(ids, self._stops)
        finish = "stop" if ids[kept - 1] in self._stops else ""
        return StepOutput(ids[:kept], finish=finish, prompt_tokens=self._prompt_tokens)

    @property
    def _prompt_tokens(self) -> int:
        return self._ending.prompt_tokens if self._counts_prompt else 0

    def end(self) -> StepOutput:
        output = self._ending.output()
        output.prompt_tokens = self._prompt_tokens
        return output
