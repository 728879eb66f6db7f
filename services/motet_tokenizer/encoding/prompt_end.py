"""Say how the prompt of a chat ends: with the head of a new turn, with a whole turn, or within one."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from motet_shared.errors import BadRequest
from motet_shared.messages import Chat

# A mark consists of characters for private use that no template writes.
_FIRST, _LENGTH = 0xF0000, 8


@dataclass(frozen=True, slots=True)
class PromptEnd:
    """starts_turn: the template writes the head of the assistant's turn.

    continues: the prompt ends with the text of the last message, which the reply continues.
    """

    starts_turn: bool = True
    continues: bool = False

    @classmethod
    def of(cls, chat: Chat) -> PromptEnd:
        """Return the end that a request asks for. Raises BadRequest for an impossible one."""
        end = cls(chat.add_generation_prompt, chat.continue_final_message)
        if end.continues:
            end._check(chat.messages)
        return end

    def _check(self, messages: list[dict[str, Any]]) -> None:
        name = "continue_final_message"
        if self.starts_turn:
            raise BadRequest(
                f"{name}: a new turn begins after it (add_generation_prompt); set one of them to false",
                param=name,
            )
        last = messages[-1] if messages else {}
        content = last.get("content")
        if last.get("role") != "assistant" or not isinstance(content, str) or not content:
            raise BadRequest(
                f"{name}: the last message has to be the assistant's, with text to continue",
                param=name,
            )


class Mark:
    """Mark the end of the last message's text, to find it in the rendered conversation."""

    def __init__(self) -> None:
        self._text = "".join(chr(_FIRST + byte) for byte in secrets.token_bytes(_LENGTH))

    def put(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with the mark behind the last one's text."""
        last = messages[-1]
        return [*messages[:-1], {**last, "content": f"{last['content']}{self._text} "}]

    def cut(self, rendered: str) -> str:
        """Return the rendered text up to the mark. Raises ValueError if the template left it out.

        Space before the mark is dropped where the template strips messages.
        """
        place = rendered.rfind(self._text)
        if place < 0:
            raise ValueError("the template does not show the end of the last message")
        is_stripped = rendered[place + len(self._text) :][:1] != " "
        return rendered[:place].rstrip() if is_stripped else rendered[:place]
