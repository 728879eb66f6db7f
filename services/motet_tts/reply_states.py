"""Receive the states of a reply while its thinker writes it, and pass them on to a talker.

They are kept until the speech ends: a talker that is lost is replaced by one that reads them all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
import numpy as np
from msgspec.structs import replace

from motet_shared import messages
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import BadRequest, StreamBroken
from motet_shared.messages import Generate, StateRef
from motet_shared.wire.stream import Stream

from .talker_prompt import States, TalkerPrompt

_decoder = msgspec.msgpack.Decoder(messages.States)


class ReplyStates:
    """Hold the states of one reply, `[T, W]` of prompt and reply together."""

    def __init__(self, store: BlobStore, talker: TalkerPrompt, voice: str):
        self._store, self._talker, self._voice = store, talker, voice
        self._parts: list[States] = []
        self._positions: list[bytes] = []  # of each part; empty: those of text
        self._count = 0
        self._ended = False
        self._news = asyncio.Event()
        self.prompt_tokens = 0

    @property
    def groups(self) -> int:
        """Return how many codes a frame has."""
        return self._talker.groups

    async def receive(self, feeds: AsyncIterator[bytes]) -> None:
        """Take states from `feeds` until their end. Raises BadRequest, BlobError, StreamBroken."""
        async for data in feeds:
            try:
                item = _decoder.decode(data)
            except ValueError as error:
                raise BadRequest(f"input: no States can be read: {error}") from None
            await self._add(item)
        self._ended = True
        self._notify()

    async def _add(self, item: messages.States) -> None:
        blob = item.ref.states
        if blob.dtype != "float32" or len(blob.shape) != 2:
            raise BadRequest(
                f"input: states are {blob.dtype} {list(blob.shape)}; give [tokens, hidden]"
            )
        states = np.frombuffer(await self._store.get(blob), "<f4").reshape(blob.shape)
        known = self._count - item.ref.start
        if known < 0:
            raise StreamBroken(f"states of tokens {self._count} to {item.ref.start} are missing")
        self.prompt_tokens = item.prompt_tokens
        if known < len(states):
            self._parts.append(states[known:])
            positions = np.frombuffer(item.ref.positions, "<i4").reshape(3, -1)[:, known:]
            self._positions.append(positions.tobytes())
            self._count += len(states) - known
            self._notify()

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    async def begun(self) -> bool:
        """Wait for the state of the reply's first token; return False if there is none."""
        while not self._ended and not self.prompt_tokens < self._count:
            await self._news.wait()
        return self.prompt_tokens < self._count if self.prompt_tokens else False

    def request(self, seed: int) -> Generate:
        """Return a talker's request, without the states."""
        return self._talker.request(self._voice, self._joined(), self.prompt_tokens, seed)

    async def attached(self, request: Generate) -> tuple[Generate, int]:
        """Return a talker's request with all that is known, and how many states that is."""
        states = self._known()
        ref = await self._store.put_async(states.data, "float32", states.shape)
        given = StateRef(states=ref, positions=self._prompt_positions())
        return replace(request, input_states=given), len(states)

    async def follow(self, stream: Stream, sent: int) -> None:
        """Feed a talker the states behind the first `sent`, until their end."""
        while True:
            ended, news, states = self._ended, self._news, self._known()
            if len(states) > sent:
                await stream.send(states[sent:].tobytes())
                sent = len(states)
            if ended:
                await stream.end_input()
                return
            await news.wait()

    def _joined(self) -> States:
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0]

    def _known(self) -> States:
        return self._talker.states(
            self._voice, self._joined(), self.prompt_tokens, ended=self._ended
        )

    def _prompt_positions(self) -> bytes:
        """Return the rotary positions of the prompt; empty if they are those of text."""
        if not any(self._positions):
            return b""
        found = [np.frombuffer(part, "<i4").reshape(3, -1) for part in self._positions]
        joined = np.concatenate(found, axis=1)[:, : self.prompt_tokens]
        return np.ascontiguousarray(self._talker.positions(joined, self._joined())).tobytes()
