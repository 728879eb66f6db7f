"""Provide an HTTP/1.1 client that reads many streamed replies at little CPU cost.

The load generator must not limit what is measured: httpx takes about 50 µs of CPU for each chunk of
a stream, this client a tenth of that. It reads bodies by length, in chunks or to the end of the
connection, and supports keep-alive and TLS; it follows no redirects and neither asks for nor
decodes compression.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

from motet_shared.errors import ConfigError

_READ = 256 << 10
_HEAD_LIMIT = 64 << 10


class BadResponse(Exception):
    """Report a reply that is not HTTP/1.1 or ends early.

    `part` names where: "status", "head", "chunk" or "body".
    """

    def __init__(self, part: str, message: str) -> None:
        super().__init__(message)
        self.part = part


class Connection:
    """Hold a connection, which serves one exchange at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.reader, self.writer = reader, writer
        self.used = False

    def close(self) -> None:
        self.writer.close()


class Client:
    """Send requests to one server over kept-alive connections."""

    def __init__(self, base: str, key: str | None = None):
        """Parse `base`, a URL without a trailing slash, to which paths are appended.

        Raises ConfigError if it is no http or https URL.
        """
        parts = urlsplit(base)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(
                f"URL: {base!r} is not an http or https URL; give one such as http://127.0.0.1:8000",
                param="URL",
            )
        self._host = parts.hostname
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = port or (443 if self._tls else 80)
        self._path = parts.path
        lines = [
            f"Host: {parts.netloc.rpartition('@')[2]}",
            "Content-Type: application/json",
            "Accept-Encoding: identity",
        ]
        lines += [f"Authorization: Bearer {key}"] if key else []
        self._headers = "".join(f"{line}\r\n" for line in lines).encode()
        self._idle: list[Connection] = []

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def request(self, method: str, path: str, body: bytes = b"") -> Reply:
        """Send a request and return the reply once its head has arrived.

        A request on a kept-alive connection that the server has closed is sent once more on a
        new one. Raises OSError or BadResponse.
        """
        head = f"{method} {self._path}{path} HTTP/1.1\r\nContent-Length: {len(body)}\r\n".encode()
        message = head + self._headers + b"\r\n" + body
        while True:
            connection = self._idle.pop() if self._idle else await self._connect()
            try:
                connection.writer.write(message)
                reply = await _read_head(connection, self._idle)
                connection.used = True
                return reply
            except BaseException as error:
                connection.close()
                if not (connection.used and isinstance(error, (OSError, BadResponse))):
                    raise

    async def _connect(self) -> Connection:
        return Connection(
            *await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=_HEAD_LIMIT)
        )


async def _read_head(connection: Connection, idle: list[Connection]) -> Reply:
    try:
        head = await connection.reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        raise BadResponse("status", "the server closed the connection without a reply") from error
    except asyncio.LimitOverrunError as error:
        raise BadResponse("head", f"the reply's head exceeds {_HEAD_LIMIT} bytes") from error
    first, *lines = head.decode("latin-1").split("\r\n")
    words = first.split(" ", 2)
    if not words[0].startswith("HTTP/1.") or len(words) < 2 or not words[1].isdigit():
        raise BadResponse(
            "status", f"the reply begins with {first[:60]!r}, not with an HTTP/1.1 status"
        )
    pairs = (line.partition(":") for line in lines if line)
    headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
    return Reply(int(words[1]), headers, connection, idle)


class Reply:
    """Represent a reply: status, headers, and a body that can be read once.

    Closing it before its body was read cancels the request.
    """

    def __init__(
        self, status: int, headers: dict[str, str], connection: Connection, idle: list[Connection]
    ):
        self.status, self.headers = status, headers
        self._connection, self._idle = connection, idle
        self._finished = False

    def close(self) -> None:
        """Return the connection to the pool if the body was read to its end, else close it."""
        if self._finished and self.headers.get("connection", "").lower() != "close":
            self._idle.append(self._connection)
        else:
            self._connection.close()

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the pieces of the body as they arrive."""
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            decoder = ChunkedBody()
            while not decoder.done:
                if data := decoder.feed(await self._read()):
                    yield data
        elif (length := self.headers.get("content-length", "")).isdigit():
            left = int(length)
            while left > 0:
                data = await self._read()
                left -= len(data)
                yield data
        else:
            while data := await self._connection.reader.read(_READ):
                yield data
            self.headers["connection"] = "close"
        self._finished = True

    async def read(self) -> bytes:
        return b"".join([piece async for piece in self.body()])

    async def _read(self) -> bytes:
        if data := await self._connection.reader.read(_READ):
            return data
        raise BadResponse("body", "the connection ended in the middle of the reply")


class ChunkedBody:
    """Decode Transfer-Encoding: chunked (RFC 9112, section 7.1), by whole chunks."""

    def __init__(self) -> None:
        self.done = False
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """Return the content of all complete chunks. Raises BadResponse for an invalid size."""
        data, at, found = self._rest + data, 0, []
        while (line_end := data.find(b"\r\n", at)) >= 0:
            size = _size(data[at:line_end])
            end = line_end + 2 + size
            if size == 0:
                self.done = data.find(b"\r\n\r\n", line_end) >= 0  # with or without trailers
                break
            if len(data) < end + 2:
                break
            found.append(data[line_end + 2 : end])
            at = end + 2
        self._rest = data[at:]
        return found[0] if len(found) == 1 else b"".join(found)


def _size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    try:
        return int(digits, 16)
    except ValueError:
        raise BadResponse(
            "chunk", f"a chunk begins with {line[:40]!r}, not with its size"
        ) from None
