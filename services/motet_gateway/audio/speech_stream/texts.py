"""Hold the texts that a client has sent and that are not spoken yet, up to a bound."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from motet_gateway.audio.speech import MOST_TEXT
from motet_pipelines.answers import noted, was_noted
from motet_pipelines.voice.speak import ClonedVoice
from motet_shared.errors import BadRequest, Overloaded

from .events import SessionConfig

MOST_UTTERANCES = 64  # that wait


@dataclass(frozen=True, slots=True)
class Settings:
    """Hold checked settings: those of the client, the served model, and its own voice, if any."""

    config: SessionConfig
    model: str
    cloned: ClonedVoice | None = None


class InputBufferFull(Overloaded):
    """Refuse text beyond the bound; it is not kept, and can be sent again."""

    code = "input_buffer_full"


class Utterance:
    """Hold one text, from its first piece to `input.done`.

    refused: nothing more of it is spoken, since it has failed or was cancelled.
    """

    def __init__(self, index: int, settings: Settings):
        self.index, self.settings = index, settings
        self.sequence = f"utterance {index}"  # of its messages
        self.ended = self.refused = False
        self.unspoken = 0  # characters
        self._pieces: deque[str] = deque()
        self._changed = asyncio.Event()

    def write(self, text: str) -> None:
        """Append a piece."""
        self.unspoken += len(text)
        self._pieces.append(text)
        self._changed.set()

    def end(self) -> None:
        """Note that no further piece follows."""
        self.ended = True
        self._changed.set()

    async def pieces(self, patience: float) -> AsyncGenerator[str, None]:
        """Yield the pieces as they come, to the end.

        Raises TimeoutError if none comes for `patience` seconds.
        """
        given = 0
        while True:
            name = f"silence {self.index} {given}"
            if was_noted(name):
                raise TimeoutError
            if self._pieces:
                given += 1
                yield self._pieces.popleft()
            elif self.ended:
                return
            else:
                self._changed.clear()
                try:
                    async with asyncio.timeout(patience):
                        await self._changed.wait()
                except TimeoutError:
                    noted(name, True)
                    raise


class Texts:
    """Queue the utterances of one connection: its reader writes, its speaker takes them in order."""

    def __init__(self) -> None:
        self._waiting: deque[Utterance] = deque()
        self._open: Utterance | None = None  # takes the next piece
        self._speaking: Utterance | None = None
        self._count = 0
        self._written = 0  # characters that were taken
        self._closed = False
        self._changed = asyncio.Event()

    @property
    def credit(self) -> int:
        """Return how many characters may be sent in all, from the beginning of the connection.

        A total, so that text on its way is not counted twice.
        """
        return self._written + self._room

    @property
    def _room(self) -> int:
        held = sum(utterance.unspoken for utterance in self._waiting)
        return MOST_TEXT - held - (self._speaking.unspoken if self._speaking is not None else 0)

    @property
    def is_open(self) -> bool:
        """Return True in the middle of an utterance."""
        return self._open is not None

    @property
    def is_idle(self) -> bool:
        """Return True if nothing is spoken and nothing waits."""
        return self._speaking is None and not self._waiting

    def write(self, text: str, settings: Settings) -> None:
        """Append a piece of text to the open utterance, or begin one.

        Raises InputBufferFull, with nothing kept, if there is no room for it; BadRequest after
        `close`.
        """
        if not text:
            return
        if self._open is None or not self._open.refused:
            if len(text) > self._room:
                raise InputBufferFull(
                    f"`text` has {len(text)} characters, and there is room for {self._room}; send"
                    " it again when `credit` of `audio.done` allows it",
                    param="text",
                )
            self._open = self._open or self._begin(settings)
            self._open.write(text)
        self._written += len(text)

    def end(self, settings: Settings) -> None:
        """End the open utterance; without one, an empty one is queued. Raises as `write`."""
        utterance = self._open or self._begin(settings)
        self._open = None
        utterance.end()

    def cancel(self) -> Utterance | None:
        """Drop everything that was sent, and return the utterance that is being spoken, if any.

        The next text begins another utterance.
        """
        if self._open is not None:
            self._open.end()
            self._open = None
        for utterance in (*self._waiting, self._speaking):
            if utterance is not None:
                utterance.refused = True
        return self._speaking

    def close(self) -> None:
        """Take no more; what is there is still spoken. An open utterance ends."""
        if self._open is not None:
            self._open.end()
            self._open = None
        self._closed = True
        self._changed.set()

    async def take(self) -> Utterance | None:
        """Return the next utterance to speak, once there is one; None once all are, after `close`."""
        self._speaking = None
        while not self._waiting:
            if self._closed:
                return None
            self._changed.clear()
            await self._changed.wait()
        self._speaking = self._waiting.popleft()
        return self._speaking

    def _begin(self, settings: Settings) -> Utterance:
        if self._closed:
            raise BadRequest("`type`: nothing follows `session.close`", param="type")
        if len(self._waiting) >= MOST_UTTERANCES:
            raise InputBufferFull(
                f"{len(self._waiting)} utterances wait; send more when some are spoken",
                param="type",
            )
        utterance = Utterance(self._count, settings)
        self._count += 1
        self._waiting.append(utterance)
        self._changed.set()
        return utterance
