"""Run one call: a realtime session whose sound is tracks, and whose events a data channel."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from motet_gateway.context import GatewayContext
from motet_gateway.http.asgi import ClientGone, Scope
from motet_gateway.http.problems import Problem
from motet_gateway.realtime.formats import input_rate
from motet_gateway.realtime.prepared_session import PreparedSession
from motet_gateway.realtime.session import Session
from motet_gateway.tenancy.auth import Caller
from motet_pipelines.voice.conversation.history import new_id
from motet_shared.errors import BadRequest

from .event_channel import EventChannel
from .microphone import Microphone
from .peer import Peer
from .playback import Playback
from .speech_track import SpeechTrack

log = logging.getLogger(__name__)

_CONNECT_WITHIN = 30.0  # seconds from the answer to the client's data channel
_FAREWELL = 1.0  # seconds for the last event of a call that lasts too long
_REFUSED_PAUSE = 1.0  # seconds of sound that are dropped after some was refused


class SessionExpired(BadRequest):
    code = "session_expired"


class Call:
    """A call from its offer to its end; its session counts as any other.

    scope: of the request with the offer. Raises BadRequest for a target that is not there.
    """

    def __init__(
        self, service: GatewayContext, caller: Caller, prepared: PreparedSession, scope: Scope
    ):
        self.id = new_id("rtc")
        self._service = service
        playback = self._playback = Playback()
        channel = self._channel = EventChannel(scope, self._hang_up)
        settings = prepared.settings
        self.session = Session(
            service, channel, caller, settings.model, settings.kind, prepared, playback
        )
        self._microphone = Microphone(lambda: input_rate(self.session.settings.audio.input_format))
        track = SpeechTrack(playback.frame)
        self._peer = Peer(service.config, track, self._microphone, channel.open, self._channel.lose)
        self._running: asyncio.Task[None] | None = None

    @property
    def lost_packets(self) -> int:
        """Return how many packets of the client's sound were recovered or concealed."""
        return self._microphone.lost

    async def answer(self, sdp: str) -> str:
        """Return the answer to the client's offer, and begin to wait for the client.

        Raises MotetError if there is none; the call is then over.
        """
        try:
            await self._service.sessions.add(self.session)
            answer = await self._peer.answer(sdp)
        except BaseException:
            await self.end()
            raise
        self._running = asyncio.create_task(self._run(), name="call")
        return answer

    async def end(self) -> None:
        """End the call and its session. A second call does nothing."""
        await self._service.sessions.end(self.session)
        self._channel.lose()
        await self._hang_up()
        self._service.calls.pop(self.id, None)

    async def over(self) -> None:
        """Wait for the end of a call that was answered."""
        if self._running is not None:
            await asyncio.wait([self._running])

    async def _hang_up(self) -> None:
        await self._peer.close()

    async def _run(self) -> None:
        """Serve the client from when its data channel is open until it leaves."""
        try:
            async with asyncio.timeout(_CONNECT_WITHIN):
                await self._channel.opened()
            await self._serve()
        except (ClientGone, TimeoutError):
            log.info("call %s: its client did not connect, or left", self.id)
        except Exception:
            log.exception("call %s failed", self.id)
        finally:
            await self.end()

    async def _serve(self) -> None:
        seconds, channel = self._service.config.call_time, self.session.channel
        beside = [
            asyncio.create_task(self._hear(), name="microphone"),
            asyncio.create_task(self._announce(), name="playback"),
        ]
        try:
            async with asyncio.timeout(seconds):
                await self.session.run(self._channel.receive, self.session.attachment)
        except TimeoutError:
            error = SessionExpired(f"a call lasts at most {seconds:g} s; begin another one")
            with contextlib.suppress(ClientGone, TimeoutError):
                async with asyncio.timeout(_FAREWELL):  # its client may read nothing
                    await self._channel.write(lambda: (channel.error(Problem.of(error)),))
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    async def _hear(self) -> None:
        """Give the client's sound to the session; a refusal is reported at most once a second."""
        loop = asyncio.get_running_loop()
        again = loop.time()
        with contextlib.suppress(ClientGone):
            async for pcm in self._microphone.pieces():
                if loop.time() >= again and not await self.session.hear(pcm):
                    again = loop.time() + _REFUSED_PAUSE

    async def _announce(self) -> None:
        """Tell the client when speech begins to be played, and when it ends."""
        channel = self.session.channel
        with contextlib.suppress(ClientGone):
            while True:
                change, reply_id = await self._playback.changes.get()
                kind = f"output_audio_buffer.{change}"
                await channel.send(channel.event(kind, response_id=reply_id))
