"""Ask decode for the tokens of a sentence, and continue at another instance when one is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import cast

from msgspec.structs import replace

from motet_shared.errors import as_motet_error
from motet_shared.messages import Generate, Tokens
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call
from motet_shared.wire.failover import Failover, StreamMoves
from motet_shared.wire.stream import Stream

from .reply_states import ReplyStates

_ROLE = "decode"


class DecodeClient:
    """Open streams at decode instances, on the event loop.

    patience: seconds without progress in which an instance may appear or restart.
    """

    def __init__(self, bus: Bus, patience: float):
        self._bus, self._patience = bus, patience

    async def tokens(
        self,
        call: Call,
        request: Generate,
        states: ReplyStates | None = None,
        groups: int = 1,
    ) -> AsyncGenerator[list[int], None]:
        """Yield the tokens of a request in batches of whatever has arrived, on behalf of a call.

        states: of another model, which the request's one reads while they come. groups: ids that
        count as one token: codes of a frame, one after the other.

        After a move the other instance continues behind the tokens that have arrived: its noise
        depends on seed and position alone. Leaving early cancels the stream. Raises what decode
        raises, and DeadlineExceeded at the call's deadline.
        """
        output: list[int] = []
        moves = Failover(
            self._bus,
            _ROLE,
            request.model,
            StreamMoves(),
            lambda: len(output),
            patience=self._patience,
            deadline=call.remaining(),
            what="speech",
        )
        while True:
            async with moves as instance:
                following = self._follow(call, request, instance, moves.left(), states)
                async with aclosing(following) as batches:
                    async for ids in batches:
                        output += ids
                        yield ids
                return
            request = replace(request, output=output)
            if len(output) >= request.sampling.max_tokens * groups:
                return

    async def _follow(
        self,
        call: Call,
        request: Generate,
        instance: str,
        deadline: float | None,
        states: ReplyStates | None,
    ) -> AsyncGenerator[list[int], None]:
        room = self._room(instance, request)
        limit = min(request.sampling.max_tokens, room) if room > 0 else request.sampling.max_tokens
        asked = replace(request, sampling=replace(request.sampling, max_tokens=limit))
        sent = 0
        if states is not None:
            asked, sent = await states.attached(asked)
        stream = self._bus.open(
            _ROLE, asked, instance=instance, deadline=deadline, epoch=call.epoch
        )
        async with stream:
            feeding = None
            if states is not None:
                feeding = asyncio.create_task(_followed(states, stream, sent))
            try:
                async for batch in cast(AsyncIterator[list[Tokens]], stream.batches()):
                    yield [token for item in batch for token in item.ids]
            finally:
                if feeding is not None:
                    feeding.cancel()
                    await asyncio.gather(feeding, return_exceptions=True)

    def _room(self, instance: str, request: Generate) -> int:
        """Return the tokens that an instance has room for behind the prompt; 0: no limit is known."""
        beats = self._bus.directory.ready(_ROLE, model=request.model, suspects=True)
        contexts = [
            card.context
            for beat in beats
            if beat.instance == instance
            for card in beat.models
            if card.name == request.model
        ]
        return max(0, contexts[0] - len(request.prompt)) if contexts else 0


async def _followed(states: ReplyStates, stream: Stream, sent: int) -> None:
    """Feed a stream the states behind the first `sent`; if that fails, the stream does."""
    try:
        await states.follow(stream, sent)
    except Exception as error:
        stream.abort(as_motet_error(error))
