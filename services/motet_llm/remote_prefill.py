"""Has prompts computed by prefill workers: chooses one, follows its stream, and hands the engine what comes.

A decode worker's side of it, on its event loop; only `choose` is called by the engine's thread. Whatever goes wrong
ends the transfer, never the request: the engine computes the rest itself.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from motet_shared.blobs import BlobStore
from motet_shared.bus import Bus
from motet_shared.call import Call
from motet_shared.errors import BadRequest, MotetError
from motet_shared.messages import Generate, Heartbeat, KvPiece, ModelCard, Prefill, tier_of
from motet_shared.stream import Stream

from .handover import Delay, Here, Policy, There, choose
from .kv_transfer import Part
from .offload import Speed
from .receiver import Handover
from .request import Key, Request
from .thread import EngineThread

ROLE = "prefill"


class RemotePrefill:
    """patience: seconds without anything new after which a prefill worker is given up. on_bug: ends this process."""

    def __init__(
        self,
        bus: Bus,
        store: BlobStore,
        thread: EngineThread,
        cards: Sequence[ModelCard],
        policy: Policy,
        patience: float,
        on_bug: Callable[[BaseException], None],
    ):
        """`cards`: of the model, and then of its adapters."""
        self._bus, self._store, self._thread = bus, store, thread
        self._name = cards[0].name
        self._kv = {card.name: card.kv for card in cards if card.kv}
        self._policy, self._patience, self._on_bug = policy, patience, on_bug
        # By the model's or adapter's name; replaced as a whole: the engine's thread reads it.
        self._workers: dict[str, tuple[Heartbeat, ...]] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._given: Counter[str] = Counter()  # tokens by worker: of the engine's thread
        self._back: Counter[str] = Counter()  # those of them that are no longer to come: of the loop
        self._speed = Speed()  # of blobs from other processes
        self._delay = Delay()
        self._expected: dict[Key, float] = {}  # seconds: of the engine's thread
        self._token_bytes = thread.engine.receiver.token_bytes

    def start(self) -> None:
        """Begin to hand over, where that is wanted and the model's keys and values can travel."""
        if self._policy != "never" and self._kv:
            self._bus.monitor.duties.append(self._look)
            self._bus.directory.on_gone.append(self._store.forget)
            self._thread.engine.receiver.choose = self._choose
            self._thread.engine.receiver.on_end = self._note

    def stats(self) -> dict[str, Any]:
        """Workers that may be asked, how often their requests went on without them, by cause, and what asking costs."""
        fallbacks = dict(self._thread.engine.receiver.fallbacks)
        return {
            "prefill_workers": len(self._workers.get(self._name, ())),
            "prefill_fallbacks": fallbacks,
            "prefill_delay": self._delay.seconds,
        }

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --------------------------------------------------------------------------------------------------------- choosing
    async def _look(self, _elapsed: float) -> None:
        """Who there is to ask: ready, not suspected, and with keys and values as ours."""
        found: dict[str, list[Heartbeat]] = {}
        for beat in self._bus.directory.ready(ROLE, model=self._name):
            for card in beat.models:
                if card.kv and self._kv.get(card.name) == card.kv:
                    found.setdefault(card.name, []).append(beat)
        self._workers = {name: tuple(beats) for name, beats in found.items()}

    def _choose(self, request: Request, here: Here) -> str | None:
        """On the engine's thread."""
        tokens = request.num_uncomputed - 1
        name = self._name if request.adapter is None else request.adapter.name
        there = [self._there(beat, request.priority) for beat in self._workers.get(name, ())]
        transfer_token = self._speed.seconds_per_byte * self._token_bytes
        choice = choose(self._policy, tokens, here, there, transfer_token, self._delay.seconds)
        if choice is None:
            return None
        self._given[choice.instance] += tokens
        self._expected[request.key] = choice.seconds
        return choice.instance

    def _note(self, key: Key, seconds: float | None) -> None:
        """On the engine's thread: a transfer has ended, with everything here after so many seconds."""
        expected = self._expected.pop(key)
        if seconds is not None and not math.isnan(expected):
            self._delay.note(seconds - expected)

    def _there(self, beat: Heartbeat, priority: int) -> There:
        """What it said last may not know of what we have given it since."""
        ours = self._given[beat.instance] - self._back[beat.instance]
        ahead = max(beat.load.get(f"prefill_{tier_of(priority)}", 0.0), float(ours))
        return There(beat.instance, ahead, beat.load.get("prefill_token", 0.0))

    # -------------------------------------------------------------------------------------------------------- following
    def on_handover(self, call: Call, handover: Handover) -> None:
        """What the engine says of a request: begin, or stop."""
        if not handover.instance:
            self.stop(call.id)
            return
        task = asyncio.get_running_loop().create_task(self._follow(call, handover), name=f"prefill {call.id}")
        self._tasks[call.id] = task
        task.add_done_callback(lambda done: self._ended(call.id, handover, done))

    def stop(self, key: Key) -> None:
        """The request has left, or goes on by itself; the worker is told."""
        task = self._tasks.get(key)
        if task is not None:
            task.cancel()

    def _ended(self, key: Key, handover: Handover, task: asyncio.Task[None]) -> None:
        self._back[handover.instance] += len(handover.tokens) - handover.start
        self._tasks.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_bug(error)

    async def _follow(self, call: Call, handover: Handover) -> None:
        request = cast(Generate, call.request)
        prefill = Prefill(
            model=request.model,
            prompt=list(handover.tokens),
            kv=self._kv[request.model],
            start=handover.start,
            request_id=request.request_id,
            priority=request.priority,
            tenant=request.tenant,
        )
        stream = self._bus.open(ROLE, prefill, instance=handover.instance, deadline=call.remaining(), epoch=call.epoch)
        cause = "incomplete"
        try:
            async with stream:
                await self._read(stream, handover)
        except TimeoutError:
            cause = "late"
        except MotetError as error:
            cause = error.code
        self._thread.end_transfer(handover.key, cause)

    async def _read(self, stream: Stream, handover: Handover) -> None:
        """Pass everything on to the engine."""
        clock = asyncio.get_running_loop().time
        async with asyncio.timeout(self._patience) as limit:
            async for body in stream:
                if not isinstance(body, KvPiece):
                    raise BadRequest(f"{handover.instance} sent {type(body).__name__} where keys and values are due")
                began = clock()
                data = await self._store.get(body.ref)
                self._speed.note(clock() - began, body.ref.nbytes)
                part = Part(body.start, body.stop, tuple(body.layers), body.first, body.end, body.last)
                content = torch.frombuffer(data, dtype=torch.uint8)
                self._thread.receive(handover.key, part, content, body.ref.dtype)
                limit.reschedule(clock() + self._patience)
                if body.last and body.stop == len(handover.tokens):
                    await stream.end_input()
