"""Send and receive on the non-blocking sockets of blobs, with or without TLS.

asyncio's own `sock_*` calls refuse TLS sockets, and its streams copy every byte twice more.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def receive_into(sock: socket.socket, into: memoryview) -> int:
    """Receive at least one byte into `into`; 0 at the end of the stream. Raises OSError."""
    if isinstance(sock, ssl.SSLSocket):
        return await _patiently(sock, lambda: sock.recv_into(into))
    return await asyncio.get_running_loop().sock_recv_into(sock, into)


async def send_all(sock: socket.socket, data: memoryview) -> None:
    """Send all of `data`. Raises OSError."""
    if not isinstance(sock, ssl.SSLSocket):
        return await asyncio.get_running_loop().sock_sendall(sock, data)
    start = 0
    while start < len(data):
        start += await _patiently(sock, lambda rest=data[start:]: sock.send(rest))  # type: ignore[misc]


async def secure(
    sock: socket.socket, context: ssl.SSLContext, *, host: str | None = None, server: bool = False
) -> ssl.SSLSocket:
    """Return `sock` after a TLS handshake; a client checks the certificate for `host`.

    The socket is closed after an error. Raises OSError, which includes ssl.SSLError.
    """
    secured = context.wrap_socket(
        sock, server_side=server, server_hostname=host, do_handshake_on_connect=False
    )
    try:
        await _patiently(secured, secured.do_handshake)
    except BaseException:
        secured.close()
        raise
    return secured


async def _patiently(sock: ssl.SSLSocket, step: Callable[[], T]) -> T:
    """Repeat `step` whenever the socket becomes ready for reading or writing as required."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return step()
        except ssl.SSLWantReadError:
            add, remove = loop.add_reader, loop.remove_reader
        except ssl.SSLWantWriteError:
            add, remove = loop.add_writer, loop.remove_writer
        ready = asyncio.Event()
        add(sock, ready.set)
        try:
            await ready.wait()
        finally:
            remove(sock)
