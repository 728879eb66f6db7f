"""Blobs over TCP: the protocol, and the client that readers use where shared memory does not reach.

    request   "MBL1", u32 length, MessagePack of Get | Release | Renew
    reply     "MBL1", u32 length, MessagePack of Ok | Failed; after the Ok of a Get its bytes follow, raw

Requests follow each other on one connection. Garbage gets a `Failed` and the connection is closed. Raw non-blocking
sockets, because asyncio's streams copy every byte twice more. A key is 128 random bits that travel over NATS only:
who knows it may read. The server is in `blobs_server`.
"""

from __future__ import annotations

import asyncio
import socket
import struct

import msgspec
from msgspec import Struct

from motet_shared.errors import BlobError, as_motet_error, from_wire

_HEAD = struct.Struct("!4sI")
_MAGIC = b"MBL1"
_MAX_MESSAGE = 16 << 10  # bytes of MessagePack; the blob itself is not in it
_PIECE = 1 << 20  # bytes between two looks at the clock
_BUFFER = 4 << 20  # socket buffers
MAX_KEYS = 256  # in one Release


class Get(Struct, array_like=True, tag="g"):
    key: str
    nbytes: int
    reader: str


class Release(Struct, array_like=True, tag="r"):
    keys: list[str]
    reader: str


class Renew(Struct, array_like=True, tag="n"):
    key: str
    reader: str


class Ok(Struct, array_like=True, tag="k"):
    nbytes: int = 0


class Failed(Struct, array_like=True, tag="!"):
    code: str
    message: str


Request = Get | Release | Renew
decode_request = msgspec.msgpack.Decoder(Request).decode
_decode_reply = msgspec.msgpack.Decoder(Ok | Failed).decode
_encode = msgspec.msgpack.Encoder().encode


class Closed(Exception):
    """The other side closed the connection between two messages."""


async def _receive(sock: socket.socket, into: memoryview, patience: float) -> None:
    """Fill `into`. TimeoutError after `patience` seconds without a byte, Closed or BlobError at the end of stream."""
    loop, have = asyncio.get_running_loop(), 0
    async with asyncio.timeout(patience) as limit:
        while have < len(into):
            count = await loop.sock_recv_into(sock, into[have : have + _PIECE])
            if count == 0:
                raise BlobError(f"connection closed after {have} of {len(into)} bytes") if have else Closed
            have += count
            limit.reschedule(loop.time() + patience)


async def receive_message(sock: socket.socket, idle: float, patience: float) -> bytes:
    """The next message's MessagePack. The first byte may take `idle` seconds, the others `patience`."""
    head = bytearray(_HEAD.size)
    await _receive(sock, memoryview(head)[:1], idle)
    await receive_rest(sock, memoryview(head)[1:], patience)
    magic, length = _HEAD.unpack(head)
    if magic != _MAGIC or length > _MAX_MESSAGE:
        raise BlobError(f"not a blob message: {bytes(head)!r}, wanted {_MAGIC!r} and at most {_MAX_MESSAGE} bytes")
    body = bytearray(length)
    await receive_rest(sock, memoryview(body), patience)
    return bytes(body)


async def receive_rest(sock: socket.socket, into: memoryview, patience: float) -> None:
    try:
        await _receive(sock, into, patience)
    except Closed:
        raise BlobError(f"connection closed in the middle of a message, {len(into)} bytes short") from None


async def send(sock: socket.socket, data: memoryview, patience: float) -> None:
    """Send all of `data`; TimeoutError when the other side takes none of a piece for `patience` seconds."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(patience) as limit:
        for start in range(0, len(data), _PIECE):
            await loop.sock_sendall(sock, data[start : start + _PIECE])
            limit.reschedule(loop.time() + patience)


def message(body: Request | Ok | Failed) -> memoryview:
    data = _encode(body)
    return memoryview(_HEAD.pack(_MAGIC, len(data)) + data)


def prepare(sock: socket.socket) -> socket.socket:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    return sock


# ------------------------------------------------------------------------------------------------------------ client
class BlobClient:
    """Talks to the servers of many owners; keeps one idle connection to each."""

    def __init__(self, *, patience: float = 10.0, transfers: int = 4, kept: int = 64):
        self._patience, self._kept = patience, kept
        self._idle: dict[str, socket.socket] = {}
        self._transfers = asyncio.Semaphore(transfers)

    async def fetch(self, address: str, request: Get, into: memoryview) -> None:
        """Fill `into` with a blob. Raises BlobError, or Overloaded."""
        async with self._transfers:
            await self._call(address, request, into)

    async def tell(self, address: str, request: Release | Renew) -> None:
        """Raises BlobError."""
        await self._call(address, request, None)

    def forget(self, address: str) -> None:
        sock = self._idle.pop(address, None)
        if sock is not None:
            sock.close()

    def close(self) -> None:
        for address in list(self._idle):
            self.forget(address)

    async def _call(self, address: str, request: Request, into: memoryview | None) -> None:
        kept = self._idle.pop(address, None)
        if kept is not None:
            try:
                return await self._exchange(kept, address, request, into)
            except (OSError, Closed):
                pass  # the owner had closed it, or began anew: a fresh connection tells
        sock = await self._connect(address)
        try:
            await self._exchange(sock, address, request, into)
        except (OSError, Closed) as error:
            raise BlobError(f"blob server {address}: {str(error) or 'connection closed'}") from None

    async def _exchange(self, sock: socket.socket, address: str, request: Request, into: memoryview | None) -> None:
        """One request on `sock`, which is kept for the next one if its stream is still in step, else closed."""
        in_step = False
        try:
            await send(sock, message(request), self._patience)
            reply = _decode_reply(await receive_message(sock, self._patience, self._patience))
            if isinstance(reply, Ok):
                await self._receive_body(sock, reply, into)
            in_step = True
        except TimeoutError:
            raise BlobError(f"blob server {address}: nothing moved for {self._patience:g} s") from None
        except msgspec.MsgspecError as error:
            raise BlobError(f"blob server {address}: malformed reply: {error}") from None
        finally:
            self._keep(address, sock) if in_step else sock.close()
        if isinstance(reply, Failed):
            raise from_wire(reply.code, reply.message)

    async def _receive_body(self, sock: socket.socket, reply: Ok, into: memoryview | None) -> None:
        if reply.nbytes != (len(into) if into is not None else 0):
            raise BlobError(f"owner sends {reply.nbytes} bytes, {len(into or b'')} were asked for")
        if into is not None:
            await receive_rest(sock, into, self._patience)

    def _keep(self, address: str, sock: socket.socket) -> None:
        if address in self._idle or len(self._idle) >= self._kept:
            sock.close()
        else:
            self._idle[address] = sock

    async def _connect(self, address: str) -> socket.socket:
        loop = asyncio.get_running_loop()
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise BlobError(f"{address[:80]!r} is not the address of a blob server; wanted host:port")
        try:
            async with asyncio.timeout(self._patience):
                found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
                family, kind, protocol, _, where = found[0]
                sock = prepare(socket.socket(family, kind, protocol))
                try:
                    await loop.sock_connect(sock, where)
                except BaseException:
                    sock.close()
                    raise
        except (OSError, OverflowError, ValueError) as error:  # names too long, empty labels and zeros are ValueErrors
            message = f"blob server {address[:80]}: cannot connect: {as_motet_error(error).message}"
            raise BlobError(message) from None
        return sock
