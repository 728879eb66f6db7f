"""What a request will probably use, and what it has used: tokens, pictures and sound."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from motet_pipelines.illustrated import Drawing
from motet_pipelines.speak import RATE
from motet_shared.audio import SAMPLE_BYTES
from motet_shared.errors import MotetError
from motet_shared.messages import Chat, Complete, Stroke, Text, Usage

from .buckets import Hold
from .tenants import SECOND, Ticket

_CHARACTERS = 4  # of a token, about
_OVERHEAD = 4  # tokens around a message
_PICTURE = 256  # tokens of one, about
REPLY_TOKENS = 256  # tokens that are held for a reply without a limit
_SPOKEN = 15  # characters per second of speech, about


def text_tokens(text: str) -> int:
    return -(-len(text) // _CHARACTERS)


def prompt_tokens(request: Chat | Complete) -> int:
    """About how many tokens the prompt has."""
    if isinstance(request, Complete):
        return text_tokens(request.prompt) if isinstance(request.prompt, str) else len(request.prompt)
    tools = text_tokens(msgspec.json.encode(request.tools).decode()) if request.tools else 0
    return tools + messages_tokens(request.messages)


def messages_tokens(messages: Sequence[dict[str, Any]]) -> int:
    return sum(_OVERHEAD + _content_tokens(message.get("content")) for message in messages)


def _content_tokens(content: Any) -> int:
    if isinstance(content, str):
        return text_tokens(content)
    parts = content or ()
    return sum(text_tokens(part["text"]) if part.get("type") == "text" else _PICTURE for part in parts)


def expected_tokens(requests: Sequence[Chat | Complete], prompts: int = 1) -> int:
    """About how many tokens all choices of a call use; one prompt is shared by the choices made of it."""
    shared = requests[:: max(len(requests) // prompts, 1)]
    replies = (REPLY_TOKENS if request.max_tokens is None else request.max_tokens for request in requests)
    return sum(map(prompt_tokens, shared)) + sum(replies)


def speech_length(text: str, speed: float) -> int:
    """About how long a text is spoken, in microseconds."""
    return max(int(len(text) / (_SPOKEN * speed) * SECOND), SECOND)


def sound_length(data_bytes: int, rate: int) -> int:
    """How long that much PCM lasts, in microseconds."""
    return -(-data_bytes * SECOND // (rate * SAMPLE_BYTES))


@contextmanager
def settled(hold: Hold, expected: int, known: Callable[[], int]) -> Iterator[None]:
    """Around work that probably uses `expected`: charged with what is `known` of it in the end.

    What fails before anything is known costs nothing; what its client leaves costs what was expected.
    """
    hold.use(expected)
    charged = expected
    try:
        yield
    except MotetError:
        charged = 0
        raise
    finally:
        hold.use((known() or charged) - expected)


class ReplyMeter:
    """Charges one reply: its prompt when it begins, its tokens and pictures as they come, and exactly at its end.

    `prompt`: tokens, about; None where another choice of the same prompt pays for it.
    """

    def __init__(self, ticket: Ticket, prompt: int | None):
        self._ticket, self._prompt = ticket, prompt
        self._counted = 0
        self._drawing = False

    def begin(self) -> None:
        self._counted = self._prompt or 0
        self._ticket.tokens.use(self._counted)

    def got(self, batch: Sequence[Any]) -> None:
        tokens = 0
        for item in batch:
            if isinstance(item, Text):
                tokens += len(item.ids)
            else:
                self._painted(item)
        self._counted += tokens
        self._ticket.tokens.use(tokens)

    def _painted(self, item: Stroke | Drawing) -> None:
        """A picture counts from its first stroke on."""
        if not self._drawing:
            self._ticket.images.use(1)
        self._drawing = not isinstance(item, Drawing)

    def done(self, usage: Usage | None, *, free: bool = False) -> None:
        """`usage`: what is known of it, else what was counted is charged. `free`: it failed, and nothing came of it."""
        known = 0 if free else self._counted
        if usage is not None:
            known = usage.completion_tokens + (0 if self._prompt is None else usage.prompt_tokens)
        self._ticket.tokens.use(known - self._counted)
        self._counted = known


class PictureMeter:
    """Charges one picture from its first stroke on, unless it fails; one that its client leaves is charged."""

    def __init__(self, images: Hold):
        self._images = images
        self._began = False

    def stroke(self) -> None:
        if not self._began:
            self._began = True
            self._images.use(1)

    def __enter__(self) -> PictureMeter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.stroke()  # strokes may be left out
        elif self._began and isinstance(error, MotetError):
            self._images.use(-1)


class SpeechMeter:
    """Charges sound as it is made."""

    def __init__(self, audio: Hold):
        self._audio = audio
        self._bytes = self._charged = 0

    def got(self, data_bytes: int) -> None:
        """That much more PCM."""
        self._bytes += data_bytes
        length = sound_length(self._bytes, RATE)
        self._audio.use(length - self._charged)
        self._charged = length
