"""Call a gateway over WebRTC with aiortc, with a microphone that tests speak into."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from aiortc import RTCConfiguration, RTCPeerConnection, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError

from motet_gateway.realtime.webrtc.event_channel import LABEL
from motet_gateway.realtime.webrtc.speech_track import SpeechTrack
from support.clients.realtime_client import PATIENCE, check_event
from support.peers.udp_relay import Relay

_CANDIDATE = re.compile(r"(?m)^a=candidate:(\S+) 1 udp \d+ (127\.0\.0\.1) (\d+) typ host.*$")


@dataclass
class CallClient:
    """Hold one end of a call, all received events, and what was played."""

    peer: RTCPeerConnection
    call_id: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    heard: bytearray = field(default_factory=bytearray)  # PCM at 48 kHz
    speech: bytearray = field(default_factory=bytearray)  # PCM at 24 kHz that is still to be sent
    received: asyncio.Queue[dict[str, Any] | None] = field(default_factory=asyncio.Queue)
    channel: Any = None
    relay: Relay | None = None  # between both, if some packets are lost
    silent: asyncio.Event = field(default_factory=asyncio.Event)  # all speech was sent

    def frame(self, size: int) -> bytes:
        """Return the next sound of the microphone: speech, else silence."""
        part = bytes(self.speech[:size])
        del self.speech[:size]
        if not self.speech:
            self.silent.set()
        return part.ljust(size, b"\0")

    async def spoken(self) -> None:
        """Wait until all of `speech` was sent."""
        self.silent.clear()
        async with asyncio.timeout(PATIENCE):
            await self.silent.wait()

    def send(self, kind: str, **fields: Any) -> None:
        self.channel.send(json.dumps({"type": kind, **fields}))

    async def next(self) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE):
            event = await self.received.get()
        assert event is not None, "the call is over"
        check_event(event)
        self.events.append(event)
        return event

    async def until(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the events up to the first of these types; any other error event fails."""
        found = [await self.next()]
        while found[-1]["type"] not in kinds:
            assert found[-1]["type"] != "error", found[-1]
            found.append(await self.next())
        return found

    async def over(self) -> None:
        """Wait for the end of the call, which the server brings about."""
        async with asyncio.timeout(PATIENCE):
            while await self.received.get() is not None:
                pass

    async def listen(self, track: Any) -> None:
        try:
            while True:
                frame = await track.recv()
                self.heard += frame.to_ndarray().reshape(-1, 2)[:, 0].tobytes()
        except MediaStreamError:
            pass


@asynccontextmanager
async def calling(
    url: str, key: str = "", *, query: str = "", loss: float = 0.0, **session: Any
) -> AsyncIterator[CallClient]:
    """Call, with these settings of the session if given.

    loss: share of the datagrams that a relay between both drops, each way.
    """
    peer = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    client = CallClient(peer)
    listening: list[asyncio.Task[None]] = []
    peer.addTrack(SpeechTrack(client.frame))
    peer.on("track", lambda track: listening.append(asyncio.create_task(client.listen(track))))
    client.channel = peer.createDataChannel(LABEL)
    client.channel.on("message", lambda text: client.received.put_nowait(json.loads(text)))
    client.channel.on("close", lambda: client.received.put_nowait(None))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_close, peer, listening)
        await peer.setLocalDescription(await peer.createOffer())
        reply = await post_offer(url, peer.localDescription.sdp, key, query, session)
        assert reply.status_code == 201, reply.text
        client.call_id = reply.headers["location"].rpartition("/")[2]
        answer = reply.text
        if loss:
            client.relay, answer = await _relayed(stack, answer, loss)
        await peer.setRemoteDescription(RTCSessionDescription(answer, "answer"))
        await client.until("session.created")
        yield client


async def post_offer(
    url: str, sdp: str, key: str = "", query: str = "", session: dict[str, Any] | None = None
) -> httpx.Response:
    """Send an offer: as it is, or in a form with the settings of a session."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE) as http:
        path = f"{url}/v1/realtime/calls{query}"
        if not session:
            headers["content-type"] = "application/sdp"
            return await http.post(path, content=sdp.encode(), headers=headers)
        parts: Any = {
            "sdp": (None, sdp.encode(), "application/sdp"),
            "session": (None, json.dumps(session).encode(), "application/json"),
        }
        return await http.post(path, files=parts, headers=headers)


async def _close(peer: RTCPeerConnection, listening: list[asyncio.Task[None]]) -> None:
    await peer.close()
    for task in listening:
        task.cancel()
    await asyncio.gather(*listening, return_exceptions=True)


async def _relayed(stack: AsyncExitStack, answer: str, loss: float) -> tuple[Relay, str]:
    """Return a relay that loses datagrams, and the answer with its address."""
    found = _CANDIDATE.search(answer)
    assert found is not None, answer
    relay = await stack.enter_async_context(Relay.to(int(found[3]), loss))
    line = found[0].replace(f" {found[3]} typ", f" {relay.port} typ")
    return relay, _CANDIDATE.sub(line, answer)
