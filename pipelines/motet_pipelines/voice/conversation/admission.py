"""Let the caller of a conversation decide what it may use, and account for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

from msgspec.structs import replace

from motet_pipelines.chat.chat import Outcome
from motet_pipelines.chat.vision import lent_pictures
from motet_pipelines.voice.speak import Outcome as SpeechOutcome
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import Unavailable
from motet_shared.messages import Audio, Chat, Text
from motet_shared.wire.discovery import Directory
from motet_shared.wire.instances import served

from .settings import ReplySettings
from .user_sound import without_media

Store = Callable[[], Awaitable[BlobStore]]  # of the files that services read


class ReplyAccount(Protocol):
    """Account for the usage of one reply, from its admission to its end."""

    def run(self, request: Chat, outcome: Outcome) -> AbstractAsyncContextManager[Chat]:
        """Hold what the request needs while it runs, and return the request to send."""

    def receive(self, batch: Sequence[Text] | Sequence[Audio]) -> None:
        """Account for text or audio that has arrived."""

    def spoke(self, model: str, speech: SpeechOutcome) -> None:
        """Note the speech of the reply, which has ended; `model` made it."""

    def settle(self) -> None:
        """Give back reserved amounts that were not used: nothing more will arrive."""

    def release(self) -> None:
        """Release everything; called once the reply has ended, in whichever way."""


class Admission(Protocol):
    """Admit the work of a conversation. Each method raises a MotetError to refuse."""

    def receive_audio(self, pcm_bytes: int, rate: int) -> None:
        """Admit audio of the user."""

    def recognizer(self, name: str) -> str:
        """Return the transcription model to use for `name`; "" accepts any."""

    def admit_reply(self, settings: ReplySettings, messages: list[dict[str, Any]]) -> ReplyAccount:
        """Admit a reply to these chat messages."""


class Unlimited:
    """Admit everything that the services can do; account for nothing."""

    def __init__(self, directory: Directory, store: Store):
        self._directory, self._store = directory, store

    def receive_audio(self, pcm_bytes: int, rate: int) -> None: ...

    def recognizer(self, name: str) -> str:
        """Return `name`, or the first model served. Raises Unavailable if there is none."""
        found = name or next(iter(served(self._directory, "asr")), "")
        if not found:
            raise Unavailable("no asr service is ready; start one: motet up --asr PATH")
        return found

    def admit_reply(self, settings: ReplySettings, messages: list[dict[str, Any]]) -> ReplyAccount:
        return _NoAccount(self._store)


class _NoAccount:
    def __init__(self, store: Store):
        self._store = store

    @asynccontextmanager
    async def run(self, request: Chat, outcome: Outcome) -> AsyncIterator[Chat]:
        """Yield the request with its media lent to the services."""
        plain, media = without_media(request.messages)
        if not media:
            yield request
            return
        async with lent_pictures(await self._store(), media) as lent:
            yield replace(request, messages=plain, images=lent)

    def receive(self, batch: Sequence[Text] | Sequence[Audio]) -> None: ...

    def spoke(self, model: str, speech: SpeechOutcome) -> None: ...

    def settle(self) -> None: ...

    def release(self) -> None: ...
