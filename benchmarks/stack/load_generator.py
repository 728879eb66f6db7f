"""Run many clients of the gateway in one process: `python -m benchmarks.stack.load_generator LOAD_JSON` prints JSON.

Raw sockets and one regular expression over the received bytes keep the CPU time of the clients
small beside that of the measured stack. Requests are real HTTP with server-sent events, or
WebSocket frames, but the clients validate neither; tests of the gateway do. Tokens are counted by
characters (see `fake_engine`), or by events for a peer.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Sequence
from time import monotonic
from typing import Literal, cast

import msgspec
import psutil
import uvloop

OPENING_SECONDS = 60.0


class Load(msgspec.Struct, kw_only=True):
    """Define the requests and the time of measurement.

    pids: processes whose CPU time is measured, in addition to this one. settle: seconds between the
    first token of the last stream and the measurement. chars: characters of a token; 0: an event is
    a token. arrivals: report the arrival of each token. prompts: one per stream; empty: the same
    short one for all.
    """

    port: int
    clients: Literal["sse", "websocket", "one"]
    model: str
    streams: int = 1
    settle: float = (
        0.5  # seconds between the first token of the last stream and the start of the measurement
    )
    seconds: float = 3.0
    chars: int = 0  # of a token; 0: an event is a token
    arrivals: bool = False  # report when each token arrived
    max_tokens: int = 1 << 20
    prompts: list[str] = []  # one per stream; none: the same short one for all
    ignore_eos: bool = False
    temperature: float = 1.0
    pids: dict[str, int] = {}


class Arrivals(msgspec.Struct):
    """Hold the arrivals of one stream: `counts[i]` tokens until `times[i]` (monotonic seconds)."""

    request: str
    counts: list[int] = []
    times: list[float] = []


class Report(msgspec.Struct):
    """Hold the results.

    cpu: seconds of CPU time by process; "clients" is this one. durations: seconds of one-token
    requests.
    """

    tokens: int
    events: int
    seconds: float
    cpu: dict[str, float]  # seconds of CPU time by process; "clients" is this one
    streams: list[Arrivals] = []
    durations: list[float] = []  # of one-token requests, seconds


class Client(asyncio.Protocol):
    """Hold one stream: send its request when connected, and count what it receives."""

    text: re.Pattern[bytes]

    def __init__(self, load: Load, number: int) -> None:
        self.load = load
        self.number = number
        self.request = ""
        self.amount = 0  # characters, or events
        self.events = 0
        self.started = asyncio.Event()  # set by the first token
        self.log: list[tuple[int, float]] = []
        self.rest = b""  # bytes not counted yet: the start of an event, or an error
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is no subclass of it
        self._transport.write(self.opening())

    def opening(self) -> bytes:
        raise NotImplementedError

    def data_received(self, data: bytes) -> None:
        now = monotonic()
        data = self.rest + data
        end, found = 0, []
        for match in self.text.finditer(data):
            found.append(match[1])
            end = match.end()
        self.rest = data[end:]
        if found:
            self.started.set()
            self.events += len(found)
            self.amount += len(b"".join(found)) if self.load.chars else len(found)
            if self.load.arrivals:
                self.log.append((self.amount // (self.load.chars or 1), now))

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class SseClient(Client):
    text = re.compile(rb'"content":"([^"]+)"')

    def opening(self) -> bytes:
        self.request = f"bench-{self.number}"
        return post(self.load, stream=True, request_id=self.request, number=self.number)


class WebSocketClient(Client):
    text = re.compile(rb'"delta":"([^"]*)"')
    _response = re.compile(rb'"id":"(resp_[^"]+)"')

    def opening(self) -> bytes:
        head = (
            f"GET /v1/realtime?model={self.load.model} HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\n"
            "Connection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
        )
        return head.encode()

    def data_received(self, data: bytes) -> None:
        if self.request:
            super().data_received(data)
            return
        self.rest += data
        if self.rest.startswith(b"HTTP/1.1 101") and b"session.created" in self.rest:
            self.rest = b""
            self._send_request()
        elif (match := self._response.search(self.rest)) is not None:
            self.request = match[1].decode()
            super().data_received(b"")

    def _send_request(self) -> None:
        item = {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "Count."}],
        }
        events = [
            {"type": "conversation.item.create", "item": item},
            {"type": "response.create", "response": {"output_modalities": ["text"]}},
        ]
        if self._transport is not None:
            self._transport.writelines([masked(msgspec.json.encode(event)) for event in events])


def masked(text: bytes) -> bytes:
    """Return a client's text frame with a zero mask."""
    size = len(text)
    length = bytes((0x80 | size,)) if size < 126 else b"\xfe" + size.to_bytes(2, "big")
    return b"\x81" + length + bytes(4) + text


def post(load: Load, *, stream: bool, request_id: str, number: int = 0) -> bytes:
    """Return the bytes of a chat completion request of stream `number`."""
    message = {"role": "user", "content": load.prompts[number] if load.prompts else "Count."}
    fields = {
        "model": load.model,
        "messages": [message],
        "max_tokens": load.max_tokens,
        "stream": stream,
    }
    if load.temperature != 1.0:
        fields["temperature"] = load.temperature
    if load.ignore_eos:
        fields["ignore_eos"] = True
    body = msgspec.json.encode(fields)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"X-Request-Id: {request_id}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


# --------------------------------------------------------------------------------------------------- measuring streams
class CpuTimes:
    """Measure the CPU time of several processes."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()} | {
            "clients": psutil.Process()
        }

    def read(self) -> dict[str, float]:
        """Return the seconds of user and system time since each process began."""
        times = {name: process.cpu_times() for name, process in self._processes.items()}
        return {name: spent.user + spent.system for name, spent in times.items()}


async def run_streams(load: Load) -> Report:
    """Open all streams, wait until all have begun, measure, and close them."""
    kind = SseClient if load.clients == "sse" else WebSocketClient
    clients = [kind(load, number) for number in range(load.streams)]
    loop = asyncio.get_running_loop()
    try:
        for client in clients:
            await loop.create_connection(lambda client=client: client, "127.0.0.1", load.port)  # type: ignore[misc]
        await _all_started(clients)
        await asyncio.sleep(load.settle)
        cpu_times = CpuTimes(load.pids)
        before = monotonic(), _total(clients), cpu_times.read()
        await asyncio.sleep(load.seconds)
        after = monotonic(), _total(clients), cpu_times.read()
    finally:
        for client in clients:
            client.abort()
    (tokens, events), (tokens_before, events_before) = after[1], before[1]
    return Report(
        tokens=tokens - tokens_before,
        events=events - events_before,
        seconds=after[0] - before[0],
        cpu={name: spent - before[2][name] for name, spent in after[2].items()},
        streams=[_arrivals(client, before[0], after[0]) for client in clients if load.arrivals],
    )


async def _all_started(clients: Sequence[Client]) -> None:
    try:
        async with asyncio.timeout(OPENING_SECONDS):
            for client in clients:
                await client.started.wait()
    except TimeoutError:
        waiting = [client for client in clients if not client.started.is_set()]
        raise RuntimeError(
            f"{len(waiting)} of {len(clients)} streams never began; one got {waiting[0].rest!r}"
        ) from None


def _total(clients: Sequence[Client]) -> tuple[int, int]:
    chars = clients[0].load.chars or 1
    return sum(client.amount // chars for client in clients), sum(
        client.events for client in clients
    )


def _arrivals(client: Client, start: float, end: float) -> Arrivals:
    """Return the arrivals during the measurement; the first entry counts the tokens before it."""
    inside = [entry for entry in client.log if start <= entry[1] <= end]
    return Arrivals(client.request, [count for count, _ in inside], [time for _, time in inside])


# --------------------------------------------------------------------------------------------------- one-token requests
async def run_one(load: Load) -> Report:
    """Send one request after the other on one connection, each streamed to its end."""
    cpu_times = CpuTimes(load.pids)
    reader, writer = await asyncio.open_connection("127.0.0.1", load.port)
    start, before = monotonic(), cpu_times.read()
    durations: list[float] = []
    while monotonic() - start < load.settle + load.seconds:
        began = monotonic()
        writer.write(post(load, stream=True, request_id=f"one-{len(durations)}"))
        await reader.readuntil(b"\r\n0\r\n\r\n")
        durations.append(monotonic() - began)
        await asyncio.sleep(0.002)  # a pause, so that queues of one request do not delay the next
    writer.close()
    cpu = {name: spent - before[name] for name, spent in cpu_times.read().items()}
    warm = durations[len(durations) // 10 :]
    return Report(
        tokens=len(durations), events=0, seconds=monotonic() - start, cpu=cpu, durations=warm
    )


if __name__ == "__main__":
    task = msgspec.json.decode(sys.argv[1], type=Load)
    report = uvloop.run(run_one(task) if task.clients == "one" else run_streams(task))
    sys.stdout.buffer.write(msgspec.json.encode(report))
