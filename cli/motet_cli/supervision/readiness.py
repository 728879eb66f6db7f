"""Poll the gateway until the stack is ready, and report what is missing."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Health:
    """Hold the answer of `/health/ready`; status 0: no answer.

    chat: True if a chat model can be used, even if other services are still missing.
    """

    status: int
    missing: str = ""
    chat: bool = False


async def probe(host: str, port: int, timeout: float = 2.0, *, tls: bool = False) -> Health:
    """Request `/health/ready` once, over a plain socket.

    Importing an HTTP client library would take longer than the rest of the command.
    """
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(
                host, port, ssl=_unverified_tls() if tls else None
            )
            try:
                writer.write(
                    f"GET /health/ready HTTP/1.0\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
                )
                reply = await reader.read(65536)
                while chunk := await reader.read(65536):
                    reply += chunk
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return Health(0)
    return _parse(reply)


def _unverified_tls() -> ssl.SSLContext:
    """Return a TLS context without verification: the certificate is not for loopback."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _parse(reply: bytes) -> Health:
    head, _, body = reply.partition(b"\r\n\r\n")
    words = head.split(None, 2)
    status = int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
    try:
        data = json.loads(body)
    except ValueError:
        return Health(status)
    if not isinstance(data, dict):
        return Health(status)
    missing = data.get("missing")
    named = ", ".join(map(str, missing)) if isinstance(missing, list) else ""
    return Health(status, named, chat=bool(data.get("models")))


async def wait_until_ready(
    host: str, port: int, on_progress: Callable[[float, Health], None], *, tls: bool = False
) -> float:
    """Poll until the status is 200; return the seconds, 0 if the first answer was 200.

    on_progress: called with the seconds so far and each other answer.
    """
    loop = asyncio.get_running_loop()
    started, waited = loop.time(), 0.0
    while (health := await probe(host, port, tls=tls)).status != 200:
        on_progress(waited, health)
        await asyncio.sleep(0.1)
        waited = loop.time() - started
    return waited


async def wait_for_port(host: str, port: int, timeout: float) -> bool:
    """Return True if a connection to the port is accepted within `timeout` seconds."""
    try:
        async with asyncio.timeout(timeout):
            while True:
                try:
                    _, writer = await asyncio.open_connection(host, port)
                except OSError:
                    await asyncio.sleep(0.02)
                else:
                    writer.close()
                    return True
    except TimeoutError:
        return False
