"""A client in another language, as it were: the wire protocol spoken with `msgpack` and `nats-py` alone.

It shares no code with Motet, on purpose: what it knows is what `messages.py` documents.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgpack
import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

PROTOCOL = 2


class Peer:
    """One caller of streams, with the identity and the permissions of a role (by default the gateway's)."""

    def __init__(self, client: Client, role: str) -> None:
        self.client = client
        self.role = role
        self.instance = f"{role}-{secrets.token_hex(4)}"
        self.inbox = f"motet.v2.inbox.{role}.{self.instance}"
        self.frames: dict[int, deque[list[Any]]] = {}
        self.errors: deque[Exception] = deque()
        self._senders: dict[int, str] = {}
        self._arrived = asyncio.Event()
        self._stream = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(
        cls, url: str, passwords: Mapping[str, str], role: str = "gateway"
    ) -> AsyncIterator[Peer]:
        async def on_error(error: Exception) -> None:
            peer.errors.append(error)

        client = Client()
        peer = cls(client, role)
        await client.connect(
            url,
            user=role,
            password=passwords[role],
            inbox_prefix=f"{peer.inbox}.r",
            error_cb=on_error,
        )
        try:
            await client.subscribe(f"{peer.inbox}.frames", cb=peer._on_frames)
            await client.subscribe(f"{peer.inbox}.open.*", cb=peer._on_open_reply)
            await client.subscribe(f"motet.v2.{role}.i.{peer.instance}.ctl", cb=peer._on_control)
            await client.flush()
            yield peer
        finally:
            await client.close()

    # ------------------------------------------------------------------------------------------------------------ calls
    async def open(self, role: str, body: dict[str, Any], credit: int = 1000, **fields: Any) -> int:
        """The number of a new stream. `body` carries its tag as `type`, which also names the operation."""
        self._stream += 1
        self.frames[self._stream] = deque()
        request = {
            "type": "open",
            "v": PROTOCOL,
            "caller": self.instance,
            "stream": self._stream,
            "credit": credit,
            "body": body,
            **fields,
        }
        await self.client.publish(
            f"motet.v2.{role}.{body['type']}",
            msgpack.packb(request),
            reply=f"{self.inbox}.open.{self._stream}",
        )
        return self._stream

    async def control(self, stream: int, *parts: list[Any]) -> None:
        instance = self._senders[stream]
        role = instance.partition("-")[0]
        subject = f"motet.v2.{role}.i.{instance}.ctl"
        await self.client.publish(
            subject, msgpack.packb(["k", PROTOCOL, self.instance, list(parts)])
        )

    async def grant(self, stream: int, total: int) -> None:
        await self.control(stream, ["c", stream, total])

    async def cancel(self, stream: int) -> None:
        await self.control(stream, ["x", stream])

    async def next(self, stream: int, timeout: float = 30.0) -> list[Any]:
        """The next frame of a stream that is no keepalive."""
        async with asyncio.timeout(timeout):
            while not self.frames[stream]:
                self._arrived.clear()
                await self._arrived.wait()
        return self.frames[stream].popleft()

    async def to_end(self, stream: int) -> list[list[Any]]:
        """All frames up to and with `End` or `Error`."""
        frames = [await self.next(stream)]
        while frames[-1][0] not in ("e", "!"):
            frames.append(await self.next(stream))
        return frames

    # ------------------------------------------------------------------------------------------------------- what comes
    async def _on_frames(self, msg: Msg) -> None:
        tag, version, sender, frames = msgpack.unpackb(msg.data)
        assert (tag, version) == ("f", PROTOCOL)
        for frame in frames:
            self._senders[frame[1]] = sender
            if frame[0] != "b" and frame[1] in self.frames:
                self.frames[frame[1]].append(frame)
        self._arrived.set()

    async def _on_open_reply(self, msg: Msg) -> None:
        """An error about an open that could not be read; without responders NATS itself answers."""
        stream = int(msg.subject.rpartition(".")[2])
        refused = [["!", stream, 0, "no_responders", str(msg.headers)]]
        frames = msgpack.unpackb(msg.data)[3] if msg.data else refused
        self.frames.setdefault(stream, deque()).extend(frames)
        self._arrived.set()

    async def _on_control(self, msg: Msg) -> None:
        """An empty list is a probe: a caller that does not answer is taken for dead."""
        if msg.reply and not msgpack.unpackb(msg.data)[3]:
            await msg.respond(msgpack.packb(["p", PROTOCOL, self.instance, "ready"]))


# --------------------------------------------------------------------------------------------------------- observing
@contextlib.asynccontextmanager
async def operator(url: str, passwords: Mapping[str, str]) -> AsyncIterator[Client]:
    """The user for people and their tools: it may look, not touch."""
    client = await nats.connect(
        url, user="operator", password=passwords["operator"], max_reconnect_attempts=2
    )
    try:
        yield client
    finally:
        await client.close()


async def service_stats(url: str, passwords: Mapping[str, str], instance: str) -> dict[str, Any]:
    """What an instance says of itself: `data` of its answer to `$SRV.STATS` (JSON, the NATS service API)."""
    async with operator(url, passwords) as client:
        name = f"motet-{instance.partition('-')[0]}"
        reply = await client.request(f"$SRV.STATS.{name}.{instance}", b"", timeout=30)
        return dict(json.loads(reply.data)["endpoints"][0]["data"])


async def integrities(
    url: str, passwords: Mapping[str, str], seconds: float = 2.0
) -> dict[str, str]:
    """What every process but the operator's says of its state within `seconds`: ok, busy, or what is wrong with it."""
    async with operator(url, passwords) as client:
        found: dict[str, str] = {}
        inbox = client.new_inbox()

        async def take(msg: Msg) -> None:
            told = json.loads(msg.data)
            if not told["id"].startswith("operator-"):
                found[told["id"]] = told["metadata"]["integrity"]

        await client.subscribe(inbox, cb=take)
        await client.publish("$SRV.STATS", b"", reply=inbox)
        await asyncio.sleep(seconds)
        return found


async def heartbeats(
    url: str, passwords: Mapping[str, str], seconds: float = 0.8
) -> dict[str, dict[str, Any]]:
    """The last heartbeat of each instance that beat within `seconds`."""
    async with operator(url, passwords) as client:
        seen: dict[str, dict[str, Any]] = {}

        async def take(msg: Msg) -> None:
            beat = msgpack.unpackb(msg.data)
            seen[beat["instance"]] = beat

        await client.subscribe("motet.v2.ev.*.*.heartbeat", cb=take)
        await asyncio.sleep(seconds)  # the time in which each instance beats at least once
        return seen


def states(url: str, passwords: Mapping[str, str]) -> dict[str, str]:
    """The state of each instance that is alive; empty while NATS is away."""
    try:
        return {
            instance: beat["state"]
            for instance, beat in asyncio.run(heartbeats(url, passwords)).items()
        }
    except (OSError, TimeoutError, nats.errors.Error):
        return {}
