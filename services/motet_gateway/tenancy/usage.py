"""Estimate what a request will use, and meter what it has used: tokens, images and audio."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from motet_media.audio import SAMPLE_BYTES
from motet_pipelines.images.chat_drawing import Drawing
from motet_pipelines.voice.speak import RATE
from motet_shared.errors import MotetError
from motet_shared.messages import Audio, Chat, Complete, DenoisingProgress, Text, Usage

from .buckets import Hold
from .tenant import SECOND, Ticket

_CHARACTERS = 4  # per token, about
_OVERHEAD = 4  # tokens of formatting per message
PICTURE_TOKENS = 256  # tokens per image, about
REPLY_TOKENS = 256  # tokens held for a reply without a token limit
_SPOKEN = 15  # characters per second of speech, about


def text_tokens(text: str) -> int:
    return -(-len(text) // _CHARACTERS)


def prompt_tokens(request: Chat | Complete) -> int:
    """Estimate the number of tokens of a prompt."""
    if isinstance(request, Complete):
        prompt = request.prompt
        return text_tokens(prompt + request.suffix) if isinstance(prompt, str) else len(prompt)
    tools = text_tokens(msgspec.json.encode(request.tools).decode()) if request.tools else 0
    return tools + messages_tokens(request.messages)


def messages_tokens(messages: Sequence[dict[str, Any]]) -> int:
    return sum(_OVERHEAD + _content_tokens(message.get("content")) for message in messages)


def _content_tokens(content: Any) -> int:
    if isinstance(content, str):
        return text_tokens(content)
    parts = content or ()
    return sum(
        text_tokens(part["text"]) if part.get("type") == "text" else PICTURE_TOKENS
        for part in parts
    )


def expected_tokens(requests: Sequence[Chat | Complete], prompts: int = 1) -> int:
    """Estimate the tokens that all choices of a call use.

    One prompt is shared by the choices made of it.
    """
    shared = requests[:: max(len(requests) // prompts, 1)]
    replies = (
        REPLY_TOKENS if request.max_tokens is None else request.max_tokens for request in requests
    )
    return sum(map(prompt_tokens, shared)) + sum(replies)


def speech_length(text: str, speed: float) -> int:
    """Estimate how long a text is spoken, in microseconds, at least one second."""
    return max(int(len(text) / (_SPOKEN * speed) * SECOND), SECOND)


def sound_length(data_bytes: int, rate: int) -> int:
    """Return the duration of `data_bytes` of PCM, in microseconds."""
    return -(-data_bytes * SECOND // (rate * SAMPLE_BYTES))


@contextmanager
def settled(hold: Hold, expected: int, known: Callable[[], int]) -> Iterator[None]:
    """Charge work that probably uses `expected` with what is `known` of its use in the end.

    Work that fails before its use is known costs nothing; work that its client leaves costs what
    was expected.
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
    """Charge one reply: its prompt at the start, tokens and images as they come, exact at the end.

    `prompt`: estimated tokens; None where another choice of the same prompt pays for it.
    """

    def __init__(self, ticket: Ticket, prompt: int | None):
        self._ticket, self._prompt = ticket, prompt
        self._counted = 0
        self._drawing = False
        self._speech = SpeechMeter(ticket.audio)

    @property
    def is_background(self) -> bool:
        """Return True for a request of a batch."""
        return self._ticket.is_background

    def begin(self) -> None:
        self._counted = self._prompt or 0
        self._ticket.tokens.use(self._counted)

    def got(self, batch: Sequence[Any]) -> None:
        tokens = 0
        for item in batch:
            if isinstance(item, Text):
                tokens += len(item.ids)
            elif isinstance(item, Audio):
                self._speech.got(len(item.data))
            elif isinstance(item, DenoisingProgress | Drawing):
                self._count_image(item)
        self._counted += tokens
        self._ticket.tokens.use(tokens)

    def _count_image(self, item: DenoisingProgress | Drawing) -> None:
        """Count an image from its first preview on."""
        if not self._drawing:
            self._ticket.images.use(1)
        self._drawing = not isinstance(item, Drawing)

    def done(self, usage: Usage | None, *, free: bool = False) -> None:
        """Settle the charge: `usage` if it is known, else what was counted.

        `free`: the reply failed through no fault of its client and costs nothing.
        """
        known = 0 if free else self._counted
        if usage is not None:
            known = usage.completion_tokens + (0 if self._prompt is None else usage.prompt_tokens)
        self._ticket.tokens.use(known - self._counted)
        self._counted = known


class ImageMeter:
    """Charge one image from its first preview on, unless it fails.

    An image that its client leaves is charged.
    """

    def __init__(self, images: Hold):
        self._images = images
        self._began = False

    def begin(self) -> None:
        if not self._began:
            self._began = True
            self._images.use(1)

    def __enter__(self) -> ImageMeter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if error is None:
            self.begin()  # previews may be left out
        elif self._began and isinstance(error, MotetError):
            self._images.use(-1)


class SpeechMeter:
    """Charge audio as it is generated."""

    def __init__(self, audio: Hold):
        self._audio = audio
        self._bytes = self._charged = 0

    def got(self, data_bytes: int) -> None:
        """Charge `data_bytes` more of PCM."""
        self._bytes += data_bytes
        length = sound_length(self._bytes, RATE)
        self._audio.use(length - self._charged)
        self._charged = length
