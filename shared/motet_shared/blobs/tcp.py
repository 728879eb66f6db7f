"""Define blob transfer over TCP, and the client for readers without shared memory.

    request   "MBL1", u32 length, MessagePack of Get | Release | Renew
    reply     "MBL1", u32 length, MessagePack of Ok | Failed; after the Ok of a Get its bytes follow, raw

Requests follow each other on one connection. A malformed request gets a `Failed` and the connection
is closed. Raw non-blocking sockets are used because asyncio's streams copy every byte twice more. A
key contains 128 random bits that travel over NATS only: knowing the key grants the right to read.
With TLS (`peer_tls`) both sides also present a certificate of the stack's CA. The server is in
`blobs.server`.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable

import msgspec
from msgspec import Struct

from motet_shared.blobs_socket import receive_into, secure, send_all
from motet_shared.errors import BlobError, as_motet_error, from_wire

_HEAD = struct.Struct("!4sI")
_MAGIC = b"MBL1"
_MAX_MESSAGE = 16 << 10  # bytes of MessagePack, without the blob itself
_PIECE = 1 << 20  # bytes between two extensions of the timeout
_BUFFER = 4 << 20  # socket buffers
MAX_KEYS = 256  # maximum keys of one Release


class Get(Struct, array_like=True, tag="g"):
    """Request for the bytes of a blob."""

    key: str
    nbytes: int
    reader: str


class Release(Struct, array_like=True, tag="r"):
    """Notice that `reader` is done with these blobs."""

    keys: list[str]
    reader: str


class Renew(Struct, array_like=True, tag="n"):
    """Request to restart the ttl of a blob."""

    key: str
    reader: str


class Ok(Struct, array_like=True, tag="k"):
    """Report success; after a Get, `nbytes` raw bytes follow."""

    nbytes: int = 0


class Failed(Struct, array_like=True, tag="!"):
    """Error, as a code of `errors` and a message."""

    code: str
    message: str


Request = Get | Release | Renew
decode_request = msgspec.msgpack.Decoder(Request).decode
_decode_reply = msgspec.msgpack.Decoder(Ok | Failed).decode
_encode = msgspec.msgpack.Encoder().encode


class Closed(Exception):
    """Report that the peer closed the connection between two messages."""


async def _receive(sock: socket.socket, into: memoryview, patience: float) -> None:
    """Fill `into` from the socket.

    Raises TimeoutError after `patience` seconds without a byte; at the end of the stream Closed, or
    BlobError if some bytes were received.
    """
    loop, have = asyncio.get_running_loop(), 0
    async with asyncio.timeout(patience) as limit:
        while have < len(into):
            count = await receive_into(sock, into[have : have + _PIECE])
            if count == 0:
                raise (
                    BlobError(f"connection closed after {have} of {len(into)} bytes")
                    if have
                    else Closed
                )
            have += count
            limit.reschedule(loop.time() + patience)


async def receive_message(
    sock: socket.socket, idle: float, patience: float, begun: Callable[[], None] = lambda: None
) -> bytes:
    """Return the MessagePack of the next message.

    The first byte may take `idle` seconds, the others `patience` each. `begun` is called once the
    first one has come. Raises BlobError if the message is malformed.
    """
    head = bytearray(_HEAD.size)
    await _receive(sock, memoryview(head)[:1], idle)
    begun()
    await receive_rest(sock, memoryview(head)[1:], patience)
    magic, length = _HEAD.unpack(head)
    if magic != _MAGIC or length > _MAX_MESSAGE:
        raise BlobError(
            f"not a blob message: {bytes(head)!r}, wanted {_MAGIC!r} and at most {_MAX_MESSAGE} bytes"
        )
    body = bytearray(length)
    await receive_rest(sock, memoryview(body), patience)
    return bytes(body)


async def receive_rest(sock: socket.socket, into: memoryview, patience: float) -> None:
    """Fill `into`; raise BlobError if the connection closes first."""
    try:
        await _receive(sock, into, patience)
    except Closed:
        raise BlobError(
            f"connection closed in the middle of a message, {len(into)} bytes short"
        ) from None


async def send(sock: socket.socket, data: memoryview, patience: float) -> None:
    """Send all of `data`; raise TimeoutError after `patience` seconds without progress."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(patience) as limit:
        for start in range(0, len(data), _PIECE):
            await send_all(sock, data[start : start + _PIECE])
            limit.reschedule(loop.time() + patience)


def message(body: Request | Ok | Failed) -> memoryview:
    """Encode a message with its header."""
    data = _encode(body)
    return memoryview(_HEAD.pack(_MAGIC, len(data)) + data)


def prepare(sock: socket.socket) -> socket.socket:
    """Make a socket non-blocking and set its options."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
    return sock


# ------------------------------------------------------------------------------------------- client
class BlobClient:
    """Talk to the servers of many owners; keep one idle connection to each."""

    def __init__(
        self,
        *,
        patience: float = 10.0,
        transfers: int = 4,
        kept: int = 64,
        tls: ssl.SSLContext | None = None,
    ):
        self._patience, self._kept, self._tls = patience, kept, tls
        self._idle: dict[str, socket.socket] = {}
        self._transfers = asyncio.Semaphore(transfers)

    async def fetch(self, address: str, request: Get, into: memoryview) -> None:
        """Fill `into` with a blob. Raises BlobError, or Overloaded."""
        async with self._transfers:
            await self._call(address, request, into)

    async def notify(self, address: str, request: Release | Renew) -> None:
        """Send a request without a body in its reply. Raises BlobError."""
        await self._call(address, request, None)

    def forget(self, address: str) -> None:
        """Close the idle connection to an address."""
        sock = self._idle.pop(address, None)
        if sock is not None:
            sock.close()

    def close(self) -> None:
        """Close all idle connections."""
        for address in list(self._idle):
            self.forget(address)

    async def _call(self, address: str, request: Request, into: memoryview | None) -> None:
        kept = self._idle.pop(address, None)
        if kept is not None:
            try:
                return await self._exchange(kept, address, request, into)
            except (OSError, Closed):
                pass  # the owner closed it or restarted: retry with a fresh connection
        sock = await self._connect(address)
        try:
            await self._exchange(sock, address, request, into)
        except (OSError, Closed) as error:
            raise BlobError(f"blob server {address}: {str(error) or 'connection closed'}") from None

    async def _exchange(
        self, sock: socket.socket, address: str, request: Request, into: memoryview | None
    ) -> None:
        """Send one request on `sock` and read its reply.

        The connection is kept for the next request if its stream is in step, else closed.
        """
        in_step = False
        try:
            await send(sock, message(request), self._patience)
            reply = _decode_reply(await receive_message(sock, self._patience, self._patience))
            if isinstance(reply, Ok):
                await self._receive_body(sock, reply, into)
            in_step = True
        except TimeoutError:
            raise BlobError(
                f"blob server {address}: nothing moved for {self._patience:g} s"
            ) from None
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
            raise BlobError(
                f"{address[:80]!r} is not the address of a blob server; wanted host:port"
            )
        try:
            async with asyncio.timeout(self._patience):
                found = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
                family, kind, protocol, _, where = found[0]
                sock = prepare(socket.socket(family, kind, protocol))
                try:
                    await loop.sock_connect(sock, where)
                    if self._tls is not None:
                        sock = await secure(sock, self._tls, host=host.strip("[]"))
                except BaseException:
                    sock.close()
                    raise
        except (
            OSError,
            OverflowError,
            ValueError,
        ) as error:  # overlong names, empty labels and NULs raise ValueError
            message = f"blob server {address[:80]}: cannot connect: {as_motet_error(error).message}"
            raise BlobError(message) from None
        return sock
