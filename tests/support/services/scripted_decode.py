"""Run a decode instance with scripted output and failures."""

from __future__ import annotations

import asyncio

from motet_shared.errors import MotetError
from motet_shared.messages import (
    BlobRef,
    Generate,
    ModelCard,
    StatedTokens,
    StateRef,
    TokenLogprob,
    Tokens,
    Usage,
)
from motet_shared.process.actor import Actor, operation
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call

MODEL = "tiny"
_NO_STATES = BlobRef("tcp", "127.0.0.1:9", "key", 0, "float32", (0, 0))


class ScriptedDecode(Actor):
    """Emit `script[len(output):]`, `step` tokens per item, up to max_tokens or an end token."""

    role = "decode"

    def __init__(
        self,
        bus: Bus,
        script: list[int],
        step: int = 1,
        context: int = 512,
        target: str = "",
        rank: int = 0,
    ):
        super().__init__(None, bus)
        self.target, self.rank = target, rank
        self.script = script
        self.step = step
        self.context = context
        self.refuse: MotetError | None = None
        self.deaf = False  # to end tokens
        self.pause_at = -1  # position at which it waits for `go_on`
        self.go_on = asyncio.Event()
        self.paused = asyncio.Event()
        self.requests: list[Generate] = []
        self.sent = 0
        self.cancelled = 0

    def models(self) -> list[ModelCard]:
        return [ModelCard(name=MODEL, context=self.context, target=self.target, rank=self.rank)]

    @operation(Generate)
    async def generate(self, call: Call, request: Generate) -> None:
        self.requests.append(request)
        if self.refuse is not None:
            raise self.refuse
        try:
            status = await self._emit(call, request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        usage = Usage(len(request.prompt), 99, cached_tokens=4)
        call.finish(status, usage, {"decode.prefill": 0.25})

    async def _emit(self, call: Call, request: Generate) -> str:
        at, sampling = len(request.output), request.sampling
        end = min(len(self.script), sampling.max_tokens)
        while at < end:
            await self._maybe_pause(at)
            ids = self.script[at : min(at + self.step, end)]
            logprobs = (
                [TokenLogprob(i, -i / 100, [(i, -i / 100)]) for i in ids]
                if sampling.logprobs >= 0
                else None
            )
            if request.return_states:
                states = StateRef(states=_NO_STATES, start=len(request.prompt) + at)
                await call.send(StatedTokens(ids, states=states))
            else:
                await call.send(Tokens(ids, logprobs))
            self.sent += len(ids)
            at += len(ids)
            if ids[-1] in sampling.stop_token_ids and not self.deaf:
                await self._maybe_pause(at)
                return "stop"
            await asyncio.sleep(0)
        return "length" if at >= sampling.max_tokens else "stop"

    async def _maybe_pause(self, at: int) -> None:
        if self.pause_at == at:
            self.paused.set()
            await self.go_on.wait()
