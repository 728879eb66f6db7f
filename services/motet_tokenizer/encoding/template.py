"""Turn chat messages into token ids with the model's own chat template.

Templates expect the message format of transformers, which is nearly OpenAI's; `normalize` closes
the gap. Control tokens that a client writes anywhere (`<|im_end|>` and the like, as a value or as a
key) are encoded as plain text: no message can forge a turn, or a picture (`control_tokens`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerBase

from motet_shared.errors import BadRequest, UnsupportedParameter
from motet_shared.reasoning.reasoning_format import ReasoningFormat
from motet_shared.tool_formats.parser import short_id
from motet_tokenizer.encoding.control_tokens import ControlTokens
from motet_tokenizer.encoding.prompt_end import Mark, PromptEnd

Message = dict[str, Any]
_NEW_TURN = PromptEnd()


class ChatTemplate:
    """Apply the chat template of one tokenizer. `model` is the name in error messages."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        model: str,
        media_marks: Mapping[str, int] = MappingProxyType({}),
        reasoning: ReasoningFormat | None = None,
        id_length: int = 0,
    ):
        """Set up the template.

        media_marks: tokens that stand for a picture or a recording, by the type of the parts that
        the model accepts besides text. reasoning: format of the model's reasoning, if it has any.
        id_length: characters of the ids of calls that it takes; 0: any.
        """
        self._tokenizer = tokenizer
        self._model = model
        self._media_marks = media_marks
        self._reasoning = reasoning
        self._id_length = id_length
        self.source = str(tokenizer.chat_template or "")
        self.takes_tools = "tools" in self.source
        self._control = ControlTokens(tokenizer, self.source)
        self._wants_parts = bool(media_marks) and bool(self.source) and not self._renders_strings()

    def encode(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]],
        options: dict[str, Any] | None = None,
        end: PromptEnd = _NEW_TURN,
    ) -> list[int]:
        """Return the token ids of the conversation, by default up to the assistant's next turn.

        options: variables of the template (`TemplateOptions.resolve`). A picture is a single
        mark; `expand_placeholders` expands it to the picture's tokens. Raises BadRequest for
        messages that the template refuses, UnsupportedParameter for tools that it does not take.
        """
        if not self.source:
            raise BadRequest(
                f"messages: model {self._model!r} has no chat template; use /v1/completions, or start"
                " it with --chat-template",
                param="messages",
            )
        if tools and not self.takes_tools:
            raise UnsupportedParameter(
                f"tools: the chat template of model {self._model!r} takes none; leave them out",
                param="tools",
            )
        plain = normalize(messages, media=[*self._media_marks])
        if self._reasoning is not None:
            plain = [self._reasoning.history(message, self.source) for message in plain]
        if self._id_length:
            plain = [_with_short_ids(message, self._id_length) for message in plain]
        if self._wants_parts:
            plain = [_in_parts(message) for message in plain]
        try:
            return self._encode(plain, tools, options or {}, end)
        except Exception as error:
            # A template is a program of the checkpoint: unexpected messages may raise any error.
            raise BadRequest(
                f"messages: the chat template of model {self._model!r} refuses them: {error}",
                param="messages",
            ) from error

    def _encode(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]],
        options: dict[str, Any],
        end: PromptEnd,
    ) -> list[int]:
        cut: Callable[[str], str] = str
        if end.continues:
            mark = Mark()
            messages, cut = mark.put(messages), mark.cut
        if not end.starts_turn:
            options = {**options, "add_generation_prompt": False}
        ids = self._control.encode_safely(messages, tools, options, cut)
        return self._apply(messages, tools, options, cut) if ids is None else ids

    def expand_placeholders(
        self, ids: Sequence[int], senses: Sequence[str], pictures: Sequence[Sequence[int]]
    ) -> list[int]:
        """Return the prompt with each mark replaced by its picture's tokens.

        Line breaks on both sides of a border are encoded together, as processors encode one text:
        Gemma 3's pictures begin and end with some, and its tokens may have several.
        senses: as in `placeholders`, which raises what this raises.
        """
        places = self.placeholders(ids, senses)
        prompt: list[int] = []
        done = 0
        for place, picture in zip(places, pictures, strict=True):
            prompt = self._joined(self._joined(prompt, ids[done:place]), picture)
            done = place + 1
        return self._joined(prompt, ids[done:])

    def placeholders(self, ids: Sequence[int], senses: Sequence[str]) -> list[int]:
        """Return the positions of the marks.

        senses: "image" or "audio" for each picture or recording, in order. Raises BadRequest unless
        the marks are as many, and of the same order.
        """
        sense_of = {token: sense for sense, token in self._media_marks.items()}
        places = [index for index, token in enumerate(ids) if token in sense_of]
        if [sense_of[ids[place]] for place in places] != list(senses):
            order = ", in another order" if len(places) == len(senses) else ""
            raise BadRequest(
                f"messages: the chat template of model {self._model!r} shows {len(places)} of {len(senses)} images"
                f"{order}; put them where its conversations have them",
                param="messages",
            )
        return places

    def _joined(self, before: list[int], after: Sequence[int]) -> list[int]:
        """Return the tokens of two texts, one behind the other; their line breaks may merge."""
        left, right = len(before), 0
        while left and self._breaks(before[left - 1]):
            left -= 1
        while right < len(after) and self._breaks(after[right]):
            right += 1
        if left == len(before) or not right:
            return [*before, *after]
        count = sum(map(self._breaks, [*before[left:], *after[:right]]))
        backend = self._tokenizer.backend_tokenizer
        merged = backend.encode("\n" * count, add_special_tokens=False).ids
        return [*before[:left], *merged, *after[right:]]

    def _breaks(self, token: int) -> int:
        """Return how many line breaks a token consists of; 0 for any other token."""
        text: str = self._tokenizer.backend_tokenizer.decode([token], skip_special_tokens=False)
        return len(text) if text.strip("\n") == "" else 0

    def _renders_strings(self) -> bool:
        """Return True if the template renders string contents; some expect lists of parts only."""
        probe = "Zebra7"
        try:
            shown = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": probe}], tokenize=False
            )
        except Exception:  # a template may raise any error
            return False
        return probe in str(shown)

    def _apply(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]],
        options: dict[str, Any],
        cut: Callable[[str], str],
    ) -> list[int]:
        options = {"add_generation_prompt": True, **options}
        text = self._tokenizer.apply_chat_template(
            messages, tools=tools or None, tokenize=False, **options
        )
        backend = self._tokenizer.backend_tokenizer
        return list(backend.encode(cut(text), add_special_tokens=False).ids)


def normalize(messages: list[Message], *, media: Sequence[str] = ()) -> list[Message]:
    """Return OpenAI's messages in the format of templates.

    Raises BadRequest that names the message.

    A content is a string; one with parts of the types `media` stays a list of parts.
    """
    if not messages:
        raise BadRequest("messages: the list is empty; give at least one message", param="messages")
    return [_message(message, f"messages[{n}]", media) for n, message in enumerate(messages)]


def _message(message: Message, where: str, media: Sequence[str]) -> Message:
    if (
        not isinstance(message, dict)
        or not isinstance(role := message.get("role"), str)
        or not role
    ):
        raise BadRequest(
            f"{where}.role: give one of system, user, assistant, tool", param=f"{where}.role"
        )
    plain = {key: value for key, value in message.items() if value is not None}
    if role == "developer":  # OpenAI's newer name; templates use the older one
        plain["role"] = "system"
    plain["content"] = _content(message.get("content"), f"{where}.content", media)
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], f"{where}.tool_calls")
    return plain


def _content(content: Any, where: str, media: Sequence[str]) -> str | list[dict[str, str]]:
    """Return a string, content parts joined to one, or the parts if media are among them."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(
            f"{where}: is a {type(content).__name__}; give a string or content parts", param=where
        )
    parts = [_part(part, f"{where}[{n}]", media) for n, part in enumerate(content)]
    if any(part["type"] in media for part in parts):
        return parts
    return "".join([part["text"] for part in parts])


def _part(part: Any, where: str, media: Sequence[str]) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind in media:
        return {"type": kind}
    if kind not in ("text", "refusal"):
        known = " and ".join(["text", *media]) + " parts"
        raise UnsupportedParameter(
            f"{where}.type: {kind!r} is not served by this model; only {known} are",
            param=f"{where}.type",
        )
    text = part.get(kind)
    if not isinstance(text, str):
        raise BadRequest(f"{where}.{kind}: give a string", param=f"{where}.{kind}")
    return {"type": "text", "text": text}


def _with_short_ids(message: Message, length: int) -> Message:
    """Return a message whose ids of calls have `length` characters, equal ones for equal ones."""
    made = dict(message)
    if isinstance(identity := message.get("tool_call_id"), str):
        made["tool_call_id"] = short_id(identity, length)
    if message.get("tool_calls"):
        made["tool_calls"] = [
            {**call, "id": short_id(identity, length)}
            if isinstance(identity := call.get("id"), str)
            else call
            for call in message["tool_calls"]
        ]
    return made


def _in_parts(message: Message) -> Message:
    content = message["content"]
    return (
        {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, str)
        else message
    )


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise BadRequest(f"{where}: give a list", param=where)
    return [_tool_call(call, f"{where}[{n}]") for n, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """Return a call with its arguments as an object for templates; OpenAI sends JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where}.function.name: give a string", param=f"{where}.function.name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            where = f"{where}.function.arguments"
            raise BadRequest(
                f"{where}: is no JSON ({error}); give an object as JSON text", param=where
            ) from None
    return {**call, "function": {**function, "arguments": arguments}}
