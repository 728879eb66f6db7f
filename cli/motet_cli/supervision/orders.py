"""Send orders to a running `motet up` over a Unix socket that only its user can open.

Messages are lines of JSON, in the folder of `connection`. An order is carried out to its end even
if its sender has gone; there is one at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from motet_cli.supervision import address, connection
from motet_shared.errors import ConfigError, MotetError, Unavailable, as_motet_error, from_wire

_MOST = 65536  # bytes of a line


class Restart(msgspec.Struct, tag="restart", forbid_unknown_fields=True):
    """Replace each process of these roles, one after the other; without roles: all but NATS."""

    roles: list[str]
    drain: float  # seconds that replies of a gateway have to end


class Scale(msgspec.Struct, tag="scale", forbid_unknown_fields=True):
    """Run so many processes of each of these roles; for each model, where roles have models."""

    counts: dict[str, int]
    drain: float


class Said(msgspec.Struct, tag="said"):
    """A progress message."""

    text: str


class Done(msgspec.Struct, tag="done"):
    """The order was carried out."""

    pass


class Failed(msgspec.Struct, tag="failed"):
    """The order failed, with an error code and a message."""

    code: str
    message: str


Order = Restart | Scale
Tell = Callable[[str], None]

_orders: msgspec.json.Decoder[Restart | Scale] = msgspec.json.Decoder(Restart | Scale)
_answers: msgspec.json.Decoder[Said | Done | Failed] = msgspec.json.Decoder(Said | Done | Failed)


def path_of(port: int) -> Path:
    """Return the socket of the stack with this HTTP port."""
    return connection.folder() / f"{port}.sock"


@asynccontextmanager
async def taken(
    path: Path, carry_out: Callable[[Order, Tell], Awaitable[None]]
) -> AsyncIterator[None]:
    """Carry out incoming orders within the context. Raises ConfigError if no socket can be made."""
    desk = _Desk(carry_out)
    try:
        server = await asyncio.start_unix_server(desk.on_client, path, limit=_MOST)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot listen for orders there: {error}; set XDG_RUNTIME_DIR"
        ) from None
    try:
        yield
    finally:
        server.close()
        await desk.close()
        _remove(path)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


class _Desk:
    def __init__(self, carry_out: Callable[[Order, Tell], Awaitable[None]]):
        self._carry_out = carry_out
        self._busy = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def on_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (task := asyncio.current_task()) is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        def tell(answer: Said | Done | Failed) -> None:
            if not writer.is_closing():
                writer.write(msgspec.json.encode(answer) + b"\n")

        try:
            await self._obey(await reader.readline(), tell)
        finally:
            with contextlib.suppress(OSError):
                writer.close()

    async def _obey(self, line: bytes, tell: Callable[[Said | Done | Failed], None]) -> None:
        try:
            order = _orders.decode(line)
            if self._busy:
                raise Unavailable("another order is being carried out; try again when it is done")
            self._busy = True
            try:
                await self._carry_out(order, lambda text: tell(Said(text)))
            finally:
                self._busy = False
            tell(Done())
        except Exception as error:
            known = as_motet_error(error)
            tell(Failed(known.code, known.message))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def give(url: str, order: Order) -> Iterator[str]:
    """Send an order to the stack that serves `url` on this machine; yield its progress messages.

    Raises ConfigError if this user runs no such stack; otherwise the stack's own error.
    """
    host, port = address.of_url(url)
    path = path_of(port)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        try:
            if not address.is_loopback(host):
                raise FileNotFoundError
            peer.connect(str(path))
        except OSError:
            raise ConfigError(
                f"--url: no `motet up` of this user serves {url}; give the URL that it said"
            ) from None
        peer.sendall(msgspec.json.encode(order) + b"\n")
        for line in peer.makefile("rb"):
            answer = _answers.decode(line)
            if isinstance(answer, Done):
                return
            if isinstance(answer, Failed):
                raise from_wire(answer.code, answer.message)
            yield answer.text
    raise MotetError(f"the stack at {url} ended before it was done")
