"""Listen: sound in as it is heard, the edges of speech out, on whichever voice activity service is alive.

    sound = Sound(24000)
    async with aclosing(listen(bus, Detect(sample_rate=24000), sound)) as edges:
        async for edge in edges:                # meanwhile somebody calls `await sound.hear(pcm)`
            if edge.kind == "start":
                sound.hold(start := edge.ms)
            elif edge.kind == "stop":
                turn = sound.between(start, edge.ms)
                sound.settle(edge.ms)

If the service dies, another one hears what is still of interest again: the turn that is being spoken, or the last
moments of the pause. Nothing is told twice. Leaving the generator early is a remote cancel; `aclosing` makes it prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Literal

from motet_shared.bus import Bus
from motet_shared.messages import Detect, SpeechEdge

from .moves import EndlessMoves
from .sound import Sound

ROLE, MODEL = "vad", "silero-vad"
# Two instances hear in frames that begin elsewhere: what one finds so much before the place that the other told is new,
# or an end of speech that nothing follows would never be told.
FRAMES_MS = 64


async def listen(bus: Bus, request: Detect, sound: Sound, *, patience: float = 5.0) -> AsyncGenerator[SpeechEdge, None]:
    """Yield the edges of speech, in times of `sound`.

    `patience`: seconds in which a service may appear or restart before the last retryable error is raised.
    """
    known = _Told()
    moves = EndlessMoves(bus, ROLE, request.model or MODEL, patience=patience)
    while True:
        async with moves as instance, bus.open(ROLE, request, instance=instance) as stream:
            base = sound.begin
            known.restart()
            sending = asyncio.create_task(sound.send_to(stream), name="listen")
            try:
                async for edge in stream:
                    if isinstance(edge, SpeechEdge) and (told := known.take(edge, base)) is not None:
                        yield told
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
            return


class _Told:
    """What was told so far: an instance that takes over hears some of it again, and may see it a little differently."""

    def __init__(self) -> None:
        self._until = 0  # ms: how far was heard
        self._state = self._seen = "silent"  # as it was told, and as the instance at work sees it

    def restart(self) -> None:
        """Another instance begins."""
        self._seen = "silent"

    def take(self, edge: SpeechEdge, base: float) -> SpeechEdge | None:
        """What is new about an edge, in times of the sound, which the instance heard from `base` on."""
        self._seen = _STATES.get(edge.kind, self._seen)
        ms, speech_ms, heard_ms = (round(base + time) for time in (edge.ms, edge.speech_ms, edge.heard_ms))
        if heard_ms < self._until - FRAMES_MS:
            return None
        self._until = heard_ms = max(heard_ms, self._until)
        kind = edge.kind
        if self._seen != self._state:
            kind = _CHANGES[self._state, self._seen]
            self._state = _STATES[kind]
        elif kind in _STATES:
            return None
        return SpeechEdge(kind, ms, speech_ms, heard_ms)


Kind = Literal["start", "stop", "idle", "pause", "resume", "heard"]
_STATES = {"start": "talking", "resume": "talking", "pause": "pausing", "stop": "silent"}
_CHANGES: dict[tuple[str, str], Kind] = {
    ("silent", "talking"): "start",
    ("silent", "pausing"): "start",  # the next edge tells of the pause
    ("talking", "pausing"): "pause",
    ("pausing", "talking"): "resume",
    ("talking", "silent"): "stop",
    ("pausing", "silent"): "stop",
}
