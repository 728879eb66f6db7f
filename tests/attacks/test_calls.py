"""Hostile WebRTC peers: floods of datagrams, offers that cost, calls without a client, too many calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aioice.candidate import Candidate
from aioice.ice import Connection

from motet_gateway.realtime.webrtc import call as call_module
from motet_gateway.realtime.webrtc import ice
from motet_gateway.realtime.webrtc.event_channel import MOST_MESSAGE
from motet_gateway.realtime.webrtc.offer import MOST_BYTES, checked_offer
from motet_gateway.service import Gateway
from motet_shared.errors import BadRequest
from motet_shared.testing import NatsServer, running
from support.clients.call_client import CallClient, calling
from support.clients.gateway_client import Http, World, world
from support.clients.offers import AUDIO, DATA, candidates, offer
from support.running.cpu_time import CpuTime
from support.services.fake_services import MODEL, FakeDecode, FakeTokenizer
from support.stages.served_gateway import KEY, Served, served_gateway
from support.stages.tenants_stage import ACME, OTHER, document

PATH = "/v1/realtime/calls"
KNOWN, STRANGER = ("10.0.0.1", 4000), ("10.0.0.2", 4000)
LIMIT = 15.0  # seconds until a test that waits for the gateway fails


# ----------------------------------------------------------------------------------------- datagrams
class Socket:
    """A call's socket whose client is at `KNOWN`, without a network and with a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 0.0
        monkeypatch.setattr(ice, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.connection = Connection(ice_controlling=False)
        host, port = KNOWN
        known = Candidate("1", 1, "udp", 1, host, port, "host")
        self.connection._remote_candidates.append(known)
        self.protocol = ice.BoundedProtocol(self.connection)
        self.protocol.local_candidate = known

    def receive(self, *datagrams: bytes, sender: tuple[str, int] = KNOWN) -> int:
        """Return how many of the datagrams are handed on."""
        handed_on = 0
        for data in datagrams:
            before = self.connection._queue.qsize()
            self.protocol.datagram_received(data, sender)
            handed_on += self.connection._queue.qsize() - before
        return handed_on

    def handle(self) -> None:
        """Handle all that waits."""
        while self.connection._queue.qsize():
            self.connection._queue.get_nowait()


def rtp(source: int) -> bytes:
    return b"\x80\x6f" + bytes(6) + source.to_bytes(4) + bytes(20)


@pytest.fixture
async def socket(monkeypatch: pytest.MonkeyPatch) -> Socket:
    return Socket(monkeypatch)


async def test_datagrams_by_second_and_those_that_wait_are_bounded(socket: Socket) -> None:
    flood = [rtp(1)] * 10_000
    first = socket.receive(*flood)
    assert first == ice._MOST_QUEUED
    socket.handle()
    assert first + socket.receive(*flood) == ice._BURST
    socket.handle()
    assert socket.receive(*flood) == 0
    socket.now += 1.0
    assert socket.receive(*flood) == ice._DATAGRAMS


async def test_streams_of_a_call_are_few(socket: Socket) -> None:
    assert socket.receive(*(rtp(source) for source in range(1000))) == ice._MOST_STREAMS
    assert socket.receive(*[rtp(0)] * 10) == 10
    report = b"\x80\xc8" + bytes(2) + (5000).to_bytes(4) + bytes(20)
    assert socket.receive(report) == 0


async def test_strangers_and_malformed_checks_reach_nothing(socket: Socket) -> None:
    assert socket.receive(*[rtp(1)] * 10, sender=STRANGER) == 0
    magic = b"\x21\x12\xa4\x42"
    checks = [
        b"",
        b"\x00",
        b"\x00\x01\x00\x00" + magic + bytes(12),
        b"\x00\x01\x00\x08" + magic + bytes(12) + b"\x00\x06\xff\xff" + bytes(4),
        b"\x00\x01\x00\x04" + magic + bytes(12) + b"\x00\x20\x00\x00",
        b"\x03" * 1400,
    ]
    assert socket.receive(*checks, sender=STRANGER) == 0
    assert socket.connection.remote_candidates == [socket.protocol.local_candidate]


# -------------------------------------------------------------------------------------------- offers
_LINES = 900  # an offer has at most a thousand


@pytest.mark.parametrize(
    "sdp",
    [
        pytest.param(offer(AUDIO + "a=fmtp:111 " + "x=1;" * 15_000 + "\n"), id="parameters"),
        pytest.param(offer(AUDIO + "a=extmap:1 " + "a" * 60_000 + "\n"), id="one long line"),
        pytest.param(offer(AUDIO + "a=ssrc:1 cname:x\n" * _LINES), id="sources"),
        pytest.param(
            offer(AUDIO + "".join(f"a=ssrc-group:FID {n} {n}\n" for n in range(_LINES))),
            id="groups of sources",
        ),
        pytest.param(
            offer(AUDIO + "".join(f"a=rtpmap:{n} opus/48000/2\n" for n in range(_LINES))),
            id="codecs",
        ),
        pytest.param(
            offer(AUDIO.replace("111 63 0", " ".join(["111"] * 15_000))), id="payload types"
        ),
        pytest.param(offer(AUDIO + "a=fingerprint:sha-256 00\n" * _LINES), id="fingerprints"),
        pytest.param(offer(head="v=0\n" + "a=group:BUNDLE 0 1\n" * _LINES), id="bundles"),
        pytest.param(
            offer(head=f"v=0\na=group:BUNDLE {' 0' * 30_000}\n"), id="sections of a bundle"
        ),
        pytest.param("v=0\r\n" + "m=audio 9 RTP/AVP 0\r\n" * _LINES, id="sections"),
        pytest.param(
            offer(AUDIO + candidates(*["udp 1 1.1.1.1 40000 typ host"] * 64)), id="candidates"
        ),
        pytest.param(offer(AUDIO, DATA + "a=sctpmap:5000 x 65535\n" * _LINES), id="sctp maps"),
        pytest.param("v=0\r\n" + "\r" * 60_000, id="empty lines"),
        pytest.param("v=0" + "\u2028" * 60_000, id="separators of lines"),
        pytest.param("v=0" + "9" * 60_000, id="digits"),
    ],
)
def test_no_offer_costs_more_than_a_second(sdp: str) -> None:
    assert len(sdp) < MOST_BYTES
    with CpuTime() as used, suppress(BadRequest):
        checked_offer(sdp, keep_public=True)
    assert used.seconds < 1


# --------------------------------------------------------------------------------------------- calls
async def offered(here: World, key: str = "", sdp: str = "") -> Http:
    headers = {"content-type": "application/sdp"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    body = (sdp or offer()).encode()
    return await Http(here.app, PATH, body, headers=headers, query=f"model={MODEL}").done()


async def ended(here: World) -> None:
    async with asyncio.timeout(LIMIT):
        while here.service.calls:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_calls_whose_client_never_comes_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_module, "_CONNECT_WITHIN", 0.1)
    async with world(call_ports="42931-42932") as here:
        for _ in range(2):  # the second time, with the ports of the first
            for _ in range(2):
                assert (await offered(here)).status == 201
            await ended(here)
            assert len(here.service.sessions) == 0


async def test_offers_that_fail_leave_no_call_and_no_port() -> None:
    async with world(call_ports="42933-42933") as here:
        for wrong in ("v=0", offer(AUDIO.replace("a=setup:actpass", "a=setup:holdconn"))):
            assert (await offered(here, sdp=wrong)).status == 400
            assert not here.service.calls
        assert (await offered(here)).status == 201
        for call in list(here.service.calls.values()):
            await call.end()


async def test_a_tenant_has_so_many_calls(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text(document("concurrent_sockets = 2"))
    async with world(tenants_file=file) as here:
        for _ in range(2):
            assert (await offered(here, ACME)).status == 201
        assert (await offered(here, ACME)).status == 429
        assert (await offered(here, OTHER)).status == 201
        assert len(here.service.calls) == 3
        for call in list(here.service.calls.values()):
            await call.end()
        assert not here.service.calls
        assert len(here.service.sessions) == 0


# ----------------------------------------------------------------------------------------- connected
@asynccontextmanager
async def connected() -> AsyncIterator[tuple[Gateway, CallClient]]:
    """Yield a gateway, and a call whose client sends no speech."""
    async with NatsServer() as nats:
        tokenizer = FakeTokenizer(None, await nats.bus("tokenizer"))
        decode = FakeDecode(None, await nats.bus("decode"))
        async with running(tokenizer), running(decode), served_gateway(nats) as gateway:
            await gateway.bus.directory.wait_for(
                lambda d: d.ready("tokenizer") and d.ready("decode"), LIMIT
            )
            audio = {"input": {"turn_detection": None}}
            session: Any = {"type": "realtime", "model": MODEL, "audio": audio}
            async with calling(Served(gateway).url, KEY, **session) as client:
                yield gateway, client


def giant(client: CallClient) -> None:
    """Send an event that is larger than the answer allows."""
    client.channel.transport._remote_max_message_size = 0
    client.channel.send(json.dumps({"type": "x" * MOST_MESSAGE}))


def other_stream(client: CallClient) -> None:
    """Send on a stream of data channels that is beyond those allowed."""
    client.channel._RTCDataChannel__id = 100
    client.channel.send("{}")


@pytest.mark.parametrize("attack", [pytest.param(giant, marks=pytest.mark.long), other_stream])
async def test_a_client_that_sends_what_it_may_not_is_hung_up(attack: Any) -> None:
    async with connected() as (gateway, client):
        assert gateway.service is not None
        assert gateway.service.calls
        attack(client)
        await client.over()
        async with asyncio.timeout(LIMIT):
            while gateway.service.calls:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert len(gateway.service.sessions) == 0


async def test_more_data_channels_are_closed_and_the_call_goes_on() -> None:
    async with connected() as (_, client):
        closed = asyncio.Event()
        more = client.peer.createDataChannel("more")
        more.on("close", closed.set)
        async with asyncio.timeout(LIMIT):
            await closed.wait()
        client.send("conversation.item.retrieve", item_id="none")
        assert (await client.next())["error"]["code"]
