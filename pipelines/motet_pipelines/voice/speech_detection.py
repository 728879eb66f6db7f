"""Detect speech: live audio in, edges of speech out, with failover between VAD services.

    audio = AudioBuffer(24000)
    async with aclosing(listen(bus, Detect(sample_rate=24000), audio)) as edges:
        async for edge in edges:                # another task calls `await audio.append(pcm)`
            if edge.kind == "start":
                audio.hold(start := edge.ms)
            elif edge.kind == "stop":
                turn = audio.between(start, edge.ms)
                audio.release(edge.ms)

If the service dies, another one processes what still matters again: the current turn, or the last
moments of the pause. No edge is reported twice. Leaving the generator early is a remote cancel;
`aclosing` makes it prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Literal

import msgspec

from motet_pipelines.answers import Answers
from motet_shared.messages import Detect, SpeechEdge
from motet_shared.wire.bus import Bus
from motet_shared.wire.failover import EndlessFailover

from .audio_buffer import AudioBuffer

ROLE, MODEL = "vad", "silero-vad"
_edges = msgspec.msgpack.Decoder(SpeechEdge)
_ends = msgspec.msgpack.Decoder(bool)
# Frames of two instances begin at different samples. Edges up to this many ms before the last
# reported position count as new, or a final end of speech might never be reported.
FRAMES_MS = 64
# An instance that begins in the middle of speech may find its end later. Speech whose end was reported
# begins again only if it lasts so many ms beyond what was processed then.
CARRIED_MS = 500


async def listen(
    bus: Bus, request: Detect, audio: AudioBuffer, *, patience: float = 5.0
) -> AsyncGenerator[SpeechEdge, None]:
    """Yield the edges of speech, in times of `audio`.

    `patience`: seconds in which a service may appear or restart before the last retryable error is
    raised.
    """
    known = ReportedEdges(round(audio.done))  # what belongs to no turn begins none
    answers = Answers(request, _edges, _ends)
    while (recorded := await answers.recorded()) is not None:
        known.note(recorded)
        yield recorded
        audio.processed(recorded.heard_ms)
    if answers.end is not None:
        return
    audio.processed(known.until)
    moves = EndlessFailover(bus, ROLE, request.model or MODEL, patience=patience)
    async with answers.live():
        while True:
            async with moves as instance, bus.open(ROLE, request, instance=instance) as stream:
                base = audio.begin
                known.restart()
                sending = asyncio.create_task(audio.send_to(stream), name="listen")
                try:
                    async for edge in stream:
                        if (
                            isinstance(edge, SpeechEdge)
                            and (reported := known.take(edge, base)) is not None
                        ):
                            await answers.record(reported)
                            yield reported
                finally:
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)
                await answers.finish(True)
                return


class ReportedEdges:
    """Record reported edges, as an instance that takes over reprocesses audio and may differ."""

    def __init__(self, until: int = 0) -> None:
        self._until = until  # ms up to which audio was processed
        self._state = self._seen = "silent"  # as reported, and as the current instance sees it
        self._taken_over = 0  # ms up to which audio had been processed when the instance started
        self._speech: float | None = None  # ms at which the speech began that the instance hears

    @property
    def until(self) -> int:
        """Return the ms up to which audio was processed."""
        return self._until

    def restart(self) -> None:
        """Start with another instance."""
        self._seen, self._speech = "silent", None
        self._taken_over = self._until

    def note(self, edge: SpeechEdge) -> None:
        """Note an edge that was reported."""
        self._until = edge.heard_ms
        self._state = _STATES.get(edge.kind, self._state)

    def take(self, edge: SpeechEdge, base: float) -> SpeechEdge | None:
        """Return the edge to report, in times of the audio, or None if it is known.

        The instance received the audio from `base` ms on.
        """
        self._seen = _STATES.get(edge.kind, self._seen)
        ms, speech_ms, heard_ms = (
            round(base + time) for time in (edge.ms, edge.speech_ms, edge.heard_ms)
        )
        if self._seen == "silent":
            self._speech = None
        elif self._speech is None:
            self._speech = speech_ms
        if heard_ms < self._until - FRAMES_MS:
            return None
        self._until = heard_ms = max(heard_ms, self._until)
        if self._state == "silent" and self._is_carried(heard_ms):
            return None
        kind = edge.kind
        if self._seen != self._state:
            kind = _CHANGES[self._state, self._seen]
            self._state = _STATES[kind]
        elif kind in _STATES:
            return None
        return SpeechEdge(kind, ms, speech_ms, heard_ms)

    def _is_carried(self, heard_ms: int) -> bool:
        """Return True if what the instance hears began before it took over, and may be over."""
        return (
            self._speech is not None
            and self._speech < self._taken_over
            and heard_ms <= self._taken_over + CARRIED_MS
        )


Kind = Literal["start", "stop", "idle", "pause", "resume", "heard"]
_STATES = {"start": "talking", "resume": "talking", "pause": "pausing", "stop": "silent"}
_CHANGES: dict[tuple[str, str], Kind] = {
    ("silent", "talking"): "start",
    ("silent", "pausing"): "start",  # the next edge reports the pause
    ("talking", "pausing"): "pause",
    ("pausing", "talking"): "resume",
    ("talking", "silent"): "stop",
    ("pausing", "silent"): "stop",
}
