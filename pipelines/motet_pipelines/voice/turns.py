"""Detect turns of the user: when a turn starts and when it ends, for a conversation.

    policy = TurnPolicy(eagerness="auto")
    async with aclosing(turns(bus, audio, policy, caption, replying)) as events:
        async for event in events:              # another task calls `await audio.append(pcm)`
            if isinstance(event, Started):
                ...                             # a reply that is being spoken has to stop
            elif isinstance(event, Ended):
                turn = audio.between(event.turn.start, event.ms)

A turn ends by silence or by its words: after "show me the" a speaker gets seconds, after "show me
the red circle" hardly any. Speech is not always a turn: a user who coughs or says "mhm" during a
reply wants to hear more of it. Such speech is transcribed, but reported only once it holds words
that are no backchannels; otherwise no event is produced.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

from motet_pipelines.answers import once
from motet_shared.errors import MotetError
from motet_shared.messages import Detect, SpeechEdge
from motet_shared.wire.bus import Bus

from .audio_buffer import AudioBuffer
from .backchannels import words_that_count
from .captions import Captions
from .end_of_turn import LONGEST_MS, SHORTEST_MS, UNSURE, end_pause_ms, end_probability
from .speech_detection import listen

PAUSE_MS = 200  # ms of silence after which the words so far are transcribed
LATE_MS = 1500  # ms of speech since the last transcript after which a turn no longer waits for one
SETTLE = 1.0  # seconds to wait for the transcript when a pause depends on it


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPolicy:
    """Policy of when a turn begins and ends. Times are in ms of audio."""

    threshold: float = 0.5  # probability of speech
    padding: int = 300  # audio before the speech that belongs to the turn
    silence: int = 500  # silence that ends a turn, whatever was said
    eagerness: str = ""  # "low" to "high": the words decide the end; `silence` is ignored
    words: bool = False  # speech during a reply is a turn only if it is no backchannel
    interrupt: int = 500  # speech that interrupts where there is no live transcript


@dataclass(slots=True, eq=False)
class Turn:
    """Turn that is being spoken, in ms of the audio."""

    start: float
    speech_start: float  # where the speech itself begins
    speech_end: float  # end of the speech so far
    transcribed: float  # `speech_end` at the last change of the transcript
    captions: Captions | None
    reported: bool = False
    pause: float | None = None  # where the speech ended, during a pause
    end_pause: float | None = (
        None  # pause that ends the turn; None: until the service reports a stop
    )

    def release(self) -> Captions | None:
        """Return its captions and give up their ownership; the caller closes them."""
        captions, self.captions = self.captions, None
        return captions


@dataclass(frozen=True, slots=True)
class Started:
    """Event: the user has started a turn."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class Ended:
    """Event: the turn ended at `ms`; its captions are finished.

    Its audio is kept until the next event is requested.
    """

    turn: Turn
    ms: int


Caption = Callable[[float], Captions | None]  # starts captions at a time in ms, if available
Replying = Callable[[float], bool]  # whether a reply is audible at a time of the audio in ms


async def turns(
    bus: Bus,
    audio: AudioBuffer,
    policy: TurnPolicy,
    caption: Caption,
    replying: Replying,
    *,
    patience: float = 5.0,
) -> AsyncGenerator[Started | Ended, None]:
    """Yield the events of turns in order.

    A turn that starts also ends, unless the generator is left.

    `patience`: seconds in which a service may appear or restart before the last retryable error is
    raised.
    """
    queue: asyncio.Queue[SpeechEdge | BaseException | None] = asyncio.Queue()
    tracker = _TurnTracker(
        bus, audio, policy, caption, replying, changed=lambda: queue.put_nowait(None)
    )
    edges = listen(bus, tracker.request(), audio, patience=patience)
    forwarding = asyncio.create_task(_forward(edges, queue), name="turns")
    try:
        while not isinstance(edge := await queue.get(), StopAsyncIteration):
            if isinstance(edge, BaseException):
                raise edge
            for event in tracker.update() if edge is None else await tracker.take(edge):
                yield event
                if isinstance(event, Ended):
                    audio.release(event.ms)
    finally:
        forwarding.cancel()
        await asyncio.gather(forwarding, return_exceptions=True)
        await tracker.close()


async def _forward(
    edges: AsyncGenerator[SpeechEdge, None], queue: asyncio.Queue[SpeechEdge | BaseException | None]
) -> None:
    try:
        async with aclosing(edges):
            async for edge in edges:
                queue.put_nowait(edge)
        queue.put_nowait(StopAsyncIteration())
    except Exception as error:
        queue.put_nowait(error)


class _TurnTracker:
    """Track the current turn from edges of speech and captions."""

    def __init__(
        self,
        bus: Bus,
        audio: AudioBuffer,
        policy: TurnPolicy,
        caption: Caption,
        replying: Replying,
        changed: Callable[[], object],
    ):
        self._bus, self._audio, self._policy = bus, audio, policy
        self._caption, self._replying, self._changed = caption, replying, changed
        self._turn: Turn | None = None
        self._position = 0.0  # ms

    def request(self) -> Detect:
        """Return the request to the voice activity service."""
        policy = self._policy
        eagerness = policy.eagerness
        return Detect(
            sample_rate=self._audio.rate,
            threshold=policy.threshold,
            prefix_padding_ms=policy.padding,
            silence_duration_ms=LONGEST_MS[eagerness] if eagerness else policy.silence,
            pause_ms=min(PAUSE_MS, SHORTEST_MS[eagerness]) if eagerness else PAUSE_MS,
        )

    async def close(self) -> None:
        if self._turn is not None and (captions := self._turn.release()) is not None:
            await captions.close()

    async def take(self, edge: SpeechEdge) -> list[Started | Ended]:
        """Process an edge of speech and return the resulting events."""
        self._position = edge.heard_ms
        if self._turn is not None:
            await self._follow(self._turn, edge)
            if (end := _end(self._turn, edge)) is not None:
                return await self._finish(self._turn, end)
        elif edge.kind in ("start", "resume"):
            self._begin(edge)
        return self._watch()

    def update(self) -> list[Started | Ended]:
        """Process a change of the captions and return the resulting events."""
        if self._turn is not None:
            self._turn.transcribed = self._turn.speech_end
        return self._watch()

    def _watch(self) -> list[Started | Ended]:
        """Report the turn as soon as it counts as one."""
        turn = self._turn
        if turn is None or turn.reported or (self._is_watched() and not self._has_words(turn)):
            return []
        turn.reported = True
        return [Started(turn)]

    def _begin(self, edge: SpeechEdge) -> None:
        """Begin a turn. Speech that resumes after the end of its turn begins another one."""
        start = max(
            edge.ms if edge.kind == "start" else edge.ms - self._policy.padding, self._audio.done
        )
        self._audio.hold(start)
        self._turn = Turn(
            start, edge.speech_ms, edge.heard_ms, edge.speech_ms, self._caption(start)
        )
        if self._turn.captions is not None:
            self._turn.captions.on_change(self._changed)
            self._turn.captions.reach(edge.heard_ms)

    async def _follow(self, turn: Turn, edge: SpeechEdge) -> None:
        if edge.kind == "pause":
            await self._pause(turn, edge)
        elif edge.kind == "resume":
            turn.pause = turn.end_pause = None
            if turn.captions is not None:
                turn.captions.resume()
        elif turn.pause is None:
            turn.speech_end = edge.speech_ms
            if turn.captions is not None and edge.kind == "heard":
                turn.captions.reach(edge.heard_ms)

    async def _pause(self, turn: Turn, edge: SpeechEdge) -> None:
        turn.pause = turn.speech_end = edge.speech_ms
        if turn.captions is not None:
            turn.captions.reach(edge.ms)
            turn.captions.pause()
        if self._policy.eagerness:
            name = f"pause of {turn.start:.0f} at {edge.heard_ms}"
            turn.end_pause = await once(name, lambda: self._end_pause(turn))

    async def _end_pause(self, turn: Turn) -> int:
        text = await _settled(turn)
        probability = await end_probability(self._bus, text) if text else UNSURE
        return end_pause_ms(probability, self._policy.eagerness)

    async def _finish(self, turn: Turn, ms: int) -> list[Started | Ended]:
        if turn.captions is not None:
            turn.captions.reach(ms)
            turn.captions.pause()
        events: list[Started | Ended] = []
        name = f"false alarm of {turn.start:.0f} at {ms}"
        if not turn.reported and not (
            self._is_watched() and await once(name, lambda: self._is_false_alarm(turn))
        ):
            turn.reported = True
            events.append(Started(turn))
        self._turn = None
        if turn.reported:
            if turn.captions is not None:
                turn.captions.finish()
            return [*events, Ended(turn, ms)]
        if (captions := turn.release()) is not None:
            await captions.close()
        self._audio.release(ms)
        return []

    # ------------------------------------------------------------------------------------- barge-in
    def _is_watched(self) -> bool:
        """Return True if speech must hold words to be a turn, as a reply is audible."""
        return self._policy.words and self._replying(self._position)

    def _has_words(self, turn: Turn) -> bool:
        """Return True for one stable word, two tentative ones, or speech too long to hold none."""
        captions = turn.captions
        if captions is None or captions.failed:
            return turn.speech_end - turn.speech_start >= self._policy.interrupt
        if captions.is_settled:
            return words_that_count(captions.text) > 0
        late = turn.speech_end - turn.transcribed >= max(LATE_MS, self._policy.interrupt)
        return late or words_that_count(captions.stable) > 0 or words_that_count(captions.text) > 1

    async def _is_false_alarm(self, turn: Turn) -> bool:
        """Return True at the end of a turn that held no words.

        If the reply ends while the words are being transcribed, they may answer it, so it is a
        turn.
        """
        await _settled(turn)
        return self._is_watched() and not self._has_words(turn)


def _end(turn: Turn, edge: SpeechEdge) -> int | None:
    """Return the end of the turn in ms if it is known now."""
    if edge.kind == "stop":
        return edge.ms
    if turn.pause is None or turn.end_pause is None or edge.heard_ms < turn.pause + turn.end_pause:
        return None
    return round(turn.pause + turn.end_pause)


async def _settled(turn: Turn) -> str:
    """Return the settled transcript, or after SETTLE seconds the tentative one; "" without any."""
    if turn.captions is None:
        return ""
    try:
        async with asyncio.timeout(SETTLE):
            return await turn.captions.settled()
    except (MotetError, TimeoutError):
        return "" if turn.captions.failed else turn.captions.text
