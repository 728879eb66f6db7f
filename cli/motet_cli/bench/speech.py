"""Read spoken replies, and measure them as a listener has them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from motet_cli.bench.http import Reply
from motet_pipelines.voice.playout import Playout

PCM_RATE = 48_000  # bytes per second of OpenAI's pcm: mono, 16 bits, 24 kHz


@dataclass(frozen=True, slots=True)
class Heard:
    """Hold the measurements of one spoken reply, in seconds.

    ttfa: from sending the request to the first audio. rtf: seconds of the reply per second of audio.
    underruns, stalled: how often, and how long, a player that starts with the first audio has
    nothing to play.
    """

    ttfa: float
    audio: float
    rtf: float
    underruns: int
    stalled: float


async def read_speech(reply: Reply, sent: float, now: Callable[[], float]) -> Heard | None:
    """Read a reply of status 200 to its end; None if it has no audio. `sent`: on the clock of `now`."""
    playout = Playout(PCM_RATE)
    playout.begin(sent)
    async for data in reply.body():
        playout.receive(len(data), now())
    playout.end(now())
    if playout.first_audio is None or playout.realtime_factor is None:
        return None
    return Heard(
        playout.first_audio,
        playout.seconds,
        playout.realtime_factor,
        playout.underruns,
        playout.stalled,
    )
