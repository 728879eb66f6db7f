"""Chat messages to token ids with the model's own chat template.

The templates know the shape of transformers, which is nearly OpenAI's; `normalize` closes the gap. Control tokens
that a client writes into a message (`<|im_end|>` and the like) are encoded as plain text: no message can forge a turn,
or a picture.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from motet_shared.errors import BadRequest, UnsupportedParameter

Message = dict[str, Any]


class ChatTemplate:
    """The chat template of one tokenizer; `model` is for messages to people."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, model: str, placeholder: int | None = None):
        """`placeholder`: the token that stands for a picture, in a model that sees."""
        self._tokenizer = tokenizer
        self._model = model
        self._placeholder = placeholder
        self.source = str(tokenizer.chat_template or "")
        self.takes_tools = "tools" in self.source
        self._control = _control_tokens(tokenizer, self.source)
        self._wants_parts = placeholder is not None and bool(self.source) and not self._shows_strings()

    def encode(self, messages: list[Message], tools: list[dict[str, Any]]) -> list[int]:
        """Token ids of the conversation up to where the assistant's next turn starts. Raises BadRequest.

        A picture is a single placeholder: `put_pictures` makes room for what the model sees of it.
        """
        if not self.source:
            raise BadRequest(
                f"messages: model {self._model!r} has no chat template; use /v1/completions", param="messages"
            )
        if tools and not self.takes_tools:
            raise UnsupportedParameter(
                f"tools: the chat template of model {self._model!r} takes none; leave them out", param="tools"
            )
        plain = normalize(messages, sees=self._placeholder is not None)
        if self._wants_parts:
            plain = [_in_parts(message) for message in plain]
        marked = bool(self._control and self._control.search(json.dumps([plain, tools], ensure_ascii=False)))
        try:
            return self._apply(plain, tools, marked)
        except Exception as error:
            # A template is a program of the checkpoint: it may fail with anything on messages it did not expect.
            raise BadRequest(
                f"messages: the chat template of model {self._model!r} refuses them: {error}", param="messages"
            ) from error

    def put_pictures(self, ids: Sequence[int], pictures: Sequence[Sequence[int]]) -> list[int]:
        """A prompt with the tokens of each picture in the place of its placeholder."""
        places = [index for index, token in enumerate(ids) if token == self._placeholder]
        if len(places) != len(pictures):
            raise BadRequest(
                f"messages: the chat template of model {self._model!r} shows {len(places)} of {len(pictures)} images; "
                "put them where its conversations have them",
                param="messages",
            )
        prompt: list[int] = []
        done = 0
        for place, picture in zip(places, pictures, strict=True):
            prompt += [*ids[done:place], *picture]
            done = place + 1
        return [*prompt, *ids[done:]]

    def _shows_strings(self) -> bool:
        """Whether the template knows contents that are strings; those of some models that see know lists of parts."""
        probe = "Zebra7"
        try:
            shown = self._tokenizer.apply_chat_template([{"role": "user", "content": probe}], tokenize=False)
        except Exception:  # a program of the checkpoint: it may fail with anything
            return False
        return probe in str(shown)

    def _apply(self, messages: list[Message], tools: list[dict[str, Any]], marked: bool) -> list[int]:
        options: dict[str, Any] = {"tools": tools or None, "add_generation_prompt": True}
        if marked:
            ids = self._tokenizer.apply_chat_template(
                messages, **options, tokenize=True, return_dict=False, sanitize_control_tokens=True
            )
            return [int(i) for i in ids]
        text = self._tokenizer.apply_chat_template(messages, **options, tokenize=False)
        return list(self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)


def _control_tokens(tokenizer: PreTrainedTokenizerBase, source: str) -> re.Pattern[str] | None:
    """A pattern that finds any token which may steer the model; finding too much only costs time."""
    added = tokenizer.added_tokens_decoder.values()
    control = [t.content for t in added if t.special or (t.content in source and not t.content.isspace())]
    if not control:
        return None
    # In JSON, which is what is searched, a quote or backslash within a token is escaped.
    return re.compile("|".join([re.escape(json.dumps(token, ensure_ascii=False)[1:-1]) for token in control]))


def normalize(messages: list[Message], *, sees: bool = False) -> list[Message]:
    """OpenAI's messages in the shape that templates read. Raises BadRequest that names the message.

    A content is a string; one with images, if the model `sees`, stays a list of parts.
    """
    if not messages:
        raise BadRequest("messages: the list is empty; give at least one message", param="messages")
    return [_message(message, f"messages[{n}]", sees) for n, message in enumerate(messages)]


def _message(message: Message, where: str, sees: bool) -> Message:
    if not isinstance(message, dict) or not isinstance(role := message.get("role"), str) or not role:
        raise BadRequest(f"{where}.role: give one of system, user, assistant, tool", param=f"{where}.role")
    plain = {key: value for key, value in message.items() if value is not None}
    if role == "developer":  # OpenAI's newer name; templates know the older one
        plain["role"] = "system"
    plain["content"] = _content(message.get("content"), f"{where}.content", sees)
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], f"{where}.tool_calls")
    return plain


def _content(content: Any, where: str, sees: bool) -> str | list[dict[str, str]]:
    """A string, or the text of content parts, joined; where images are among them, the parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where}: is a {type(content).__name__}; give a string or content parts", param=where)
    parts = [_part(part, f"{where}[{n}]", sees) for n, part in enumerate(content)]
    if any(part["type"] == "image" for part in parts):
        return parts
    return "".join([part["text"] for part in parts])


def _part(part: Any, where: str, sees: bool) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "image" and sees:
        return {"type": "image"}
    if kind not in ("text", "refusal"):
        known = "text and image parts" if sees else "text parts"
        raise UnsupportedParameter(
            f"{where}.type: {kind!r} is not served by this model; only {known} are", param=f"{where}.type"
        )
    text = part.get(kind)
    if not isinstance(text, str):
        raise BadRequest(f"{where}.{kind}: give a string", param=f"{where}.{kind}")
    return {"type": "text", "text": text}


def _in_parts(message: Message) -> Message:
    content = message["content"]
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise BadRequest(f"{where}: give a list", param=where)
    return [_tool_call(call, f"{where}[{n}]") for n, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """OpenAI has the arguments as JSON text; templates write JSON themselves and want the object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{where}.function.name: give a string", param=f"{where}.function.name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            where = f"{where}.function.arguments"
            raise BadRequest(f"{where}: is no JSON ({error}); give an object as JSON text", param=where) from None
    return {**call, "function": {**function, "arguments": arguments}}
