"""Turns: who speaks, and until when, as a conversation needs it.

    async with aclosing(turns(bus, sound, Manners(eagerness="auto"), caption, replying)) as told:
        async for event in told:                # meanwhile somebody calls `await sound.hear(pcm)`
            if isinstance(event, Started):
                ...                             # a reply that is being spoken has to stop
            elif isinstance(event, Ended):
                turn = sound.between(event.turn.start, event.ms)

Silence ends a turn, or the words do: after "show me the" a speaker is given seconds, after "show me the red circle"
hardly any. And speech is not always a turn: while a reply is heard, somebody who coughs or says "mhm" wants to hear
more of it. What he says is understood, but told only once it says something; otherwise nobody ever learns of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from motet_shared.bus import Bus
from motet_shared.errors import MotetError
from motet_shared.messages import Detect, SpeechEdge

from .backchannels import words_that_count
from .captions import Captions
from .listen import listen
from .patience import LONGEST_MS, SHORTEST_MS, UNSURE, finished, patience_ms
from .sound import Sound

PAUSE_MS = 200  # of silence in which the words so far are understood
LATE_MS = 1500  # of speech: who has said so much since he was understood last is not kept waiting
SETTLE = 1.0  # seconds that words may take when a pause depends on them


@dataclass(frozen=True, slots=True, kw_only=True)
class Manners:
    """What makes a turn. Times are in ms of sound."""

    threshold: float = 0.5  # probability of speech
    padding: int = 300  # before the speech
    silence: int = 500  # that ends a turn, whatever was said
    eagerness: str = ""  # "low" to "high": the words decide when it ends, and `silence` does not matter
    words: bool = False  # what is said during a reply has to say something
    interrupt: int = 500  # speech that is long enough to say something where nothing is understood live


@dataclass(slots=True, eq=False)
class Turn:
    """One that is being spoken, in ms of the sound."""

    start: float
    speech: float  # where the speech itself begins
    spoken: float  # how far it has come
    understood: float  # how far it had come when more of it was understood
    captions: Captions | None
    told: bool = False
    pause: float | None = None  # where the speech ended, if it has for now
    patience: float | None = None  # how long that may last; None: until the service says that it is the end

    def release(self) -> Captions | None:
        """Its words, for who goes on with them alone."""
        captions, self.captions = self.captions, None
        return captions


@dataclass(frozen=True, slots=True)
class Started:
    """The user has the floor."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class Ended:
    """The turn is over at `ms`; its captions are finished. Its sound is forgotten when the next event is asked for."""

    turn: Turn
    ms: int


Caption = Callable[[float], Captions | None]  # begins to understand what is said from there on, if anybody can
Replying = Callable[[float], bool]  # whether a reply is heard when the sound is there


async def turns(
    bus: Bus, sound: Sound, manners: Manners, caption: Caption, replying: Replying, *, patience: float = 5.0
) -> AsyncGenerator[Started | Ended, None]:
    """Yield what becomes of turns, in their order. A turn that starts also ends, unless the generator is left.

    `patience`: seconds in which a service may appear or restart before the last retryable error is raised.
    """
    news: asyncio.Queue[SpeechEdge | BaseException | None] = asyncio.Queue()
    floor = _Floor(bus, sound, manners, caption, replying, changed=lambda: news.put_nowait(None))
    edges = listen(bus, floor.request(), sound, patience=patience)
    hearing = asyncio.create_task(_pass_on(edges, news), name="turns")
    try:
        while not isinstance(edge := await news.get(), StopAsyncIteration):
            if isinstance(edge, BaseException):
                raise edge
            for event in floor.hear() if edge is None else await floor.take(edge):
                yield event
                if isinstance(event, Ended):
                    sound.settle(event.ms)
    finally:
        hearing.cancel()
        await asyncio.gather(hearing, return_exceptions=True)
        await floor.close()


async def _pass_on(
    edges: AsyncGenerator[SpeechEdge, None], news: asyncio.Queue[SpeechEdge | BaseException | None]
) -> None:
    try:
        async with aclosing(edges):
            async for edge in edges:
                news.put_nowait(edge)
        news.put_nowait(StopAsyncIteration())
    except Exception as error:
        news.put_nowait(error)


class _Floor:
    """Who has it."""

    def __init__(
        self,
        bus: Bus,
        sound: Sound,
        manners: Manners,
        caption: Caption,
        replying: Replying,
        changed: Callable[[], object],
    ):
        self._bus, self._sound, self._manners = bus, sound, manners
        self._caption, self._replying, self._changed = caption, replying, changed
        self._turn: Turn | None = None
        self._heard = 0.0  # ms

    def request(self) -> Detect:
        """What the voice activity service has to tell."""
        manners = self._manners
        eagerness = manners.eagerness
        return Detect(
            sample_rate=self._sound.rate,
            threshold=manners.threshold,
            prefix_padding_ms=manners.padding,
            silence_duration_ms=LONGEST_MS[eagerness] if eagerness else manners.silence,
            pause_ms=min(PAUSE_MS, SHORTEST_MS[eagerness]) if eagerness else PAUSE_MS,
        )

    async def close(self) -> None:
        if self._turn is not None and (captions := self._turn.release()) is not None:
            await captions.close()

    async def take(self, edge: SpeechEdge) -> list[Started | Ended]:
        """What becomes of the turn."""
        self._heard = edge.heard_ms
        if self._turn is not None:
            await self._follow(self._turn, edge)
            if (end := _end(self._turn, edge)) is not None:
                return await self._finish(self._turn, end)
        elif edge.kind in ("start", "resume"):
            self._begin(edge)
        return self._watch()

    def hear(self) -> list[Started | Ended]:
        """More of the turn was understood."""
        if self._turn is not None:
            self._turn.understood = self._turn.spoken
        return self._watch()

    def _watch(self) -> list[Started | Ended]:
        """Tell of a turn as soon as it is one."""
        turn = self._turn
        if turn is None or turn.told or (self._is_watched() and not self._says_something(turn)):
            return []
        turn.told = True
        return [Started(turn)]

    def _begin(self, edge: SpeechEdge) -> None:
        """Speech that goes on after its turn was over begins another one."""
        start = max(edge.ms if edge.kind == "start" else edge.ms - self._manners.padding, self._sound.done)
        self._sound.hold(start)
        self._turn = Turn(start, edge.speech_ms, edge.heard_ms, edge.speech_ms, self._caption(start))
        if self._turn.captions is not None:
            self._turn.captions.watch(self._changed)
            self._turn.captions.reach(edge.heard_ms)

    async def _follow(self, turn: Turn, edge: SpeechEdge) -> None:
        if edge.kind == "pause":
            await self._pause(turn, edge)
        elif edge.kind == "resume":
            turn.pause = turn.patience = None
            if turn.captions is not None:
                turn.captions.go_on()
        elif turn.pause is None:
            turn.spoken = edge.speech_ms
            if turn.captions is not None and edge.kind == "heard":
                turn.captions.reach(edge.heard_ms)

    async def _pause(self, turn: Turn, edge: SpeechEdge) -> None:
        turn.pause = turn.spoken = edge.speech_ms
        if turn.captions is not None:
            turn.captions.reach(edge.ms)
            turn.captions.pause()
        if self._manners.eagerness:
            text = await _settled(turn)
            sure = await finished(self._bus, text) if text else UNSURE
            turn.patience = patience_ms(sure, self._manners.eagerness)

    async def _finish(self, turn: Turn, ms: int) -> list[Started | Ended]:
        if turn.captions is not None:
            turn.captions.reach(ms)
            turn.captions.pause()
        events: list[Started | Ended] = []
        if not turn.told and not (self._is_watched() and await self._is_false_alarm(turn)):
            turn.told = True
            events.append(Started(turn))
        self._turn = None
        if turn.told:
            if turn.captions is not None:
                turn.captions.finish()
            return [*events, Ended(turn, ms)]
        if (captions := turn.release()) is not None:
            await captions.close()
        self._sound.settle(ms)
        return []

    # ------------------------------------------------------------------------------------------------- interruptions
    def _is_watched(self) -> bool:
        """Whether what is said now has to say something to be a turn."""
        return self._manners.words and self._replying(self._heard)

    def _says_something(self, turn: Turn) -> bool:
        """A word that is certain, two that may be, or speech for so long that there must be some."""
        captions = turn.captions
        if captions is None or captions.failed:
            return turn.spoken - turn.speech >= self._manners.interrupt
        if captions.is_settled:
            return words_that_count(captions.text) > 0
        late = turn.spoken - turn.understood >= max(LATE_MS, self._manners.interrupt)
        return late or words_that_count(captions.stable) > 0 or words_that_count(captions.text) > 1

    async def _is_false_alarm(self, turn: Turn) -> bool:
        """At its end. If the reply ends while the words are made out, they may well be an answer to it."""
        await _settled(turn)
        return self._is_watched() and not self._says_something(turn)


def _end(turn: Turn, edge: SpeechEdge) -> int | None:
    """Where it ends, if that is known now."""
    if edge.kind == "stop":
        return edge.ms
    if turn.pause is None or turn.patience is None or edge.heard_ms < turn.pause + turn.patience:
        return None
    return round(turn.pause + turn.patience)


async def _settled(turn: Turn) -> str:
    """The words so far, or as many as there are in time; "" where nobody understands."""
    if turn.captions is None:
        return ""
    try:
        return await asyncio.wait_for(turn.captions.settled(), SETTLE)
    except (MotetError, TimeoutError):
        return "" if turn.captions.failed else turn.captions.text
