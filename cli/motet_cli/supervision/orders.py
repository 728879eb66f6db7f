"""Send orders to a running `motet up` over a Unix socket that only its user can open.

The socket is in the folder of `connection`; messages are lines of JSON. One order is carried out at
a time, to its end even if its sender disconnects.
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

_MAX_LINE = 65536  # bytes


class Restart(msgspec.Struct, tag="restart", forbid_unknown_fields=True):
    """Order to replace the processes of these roles one by one; no roles: all but NATS.

    drain: seconds that replies of a gateway have to end.
    """

    roles: list[str]
    drain: float


class Scale(msgspec.Struct, tag="scale", forbid_unknown_fields=True):
    """Order to run this many processes of each role, for each model if the role has models.

    drain: seconds that replies of a gateway have to end.
    """

    counts: dict[str, int]
    drain: float


class Invite(msgspec.Struct, tag="invite", forbid_unknown_fields=True):
    """Order to issue a token with which other hosts join; the progress is the command for them.

    roles: that they may run; none: all that the stack offers. seconds: of validity. uses: hosts.
    """

    roles: list[str]
    seconds: float
    uses: int


class Leave(msgspec.Struct, tag="leave", forbid_unknown_fields=True):
    """Order a host that has joined to leave.

    drain: seconds that running work has to end, before it goes on at other hosts.
    """

    drain: float


class OrderProgress(msgspec.Struct, tag="said"):
    """Report the progress of an order."""

    text: str


class OrderDone(msgspec.Struct, tag="done"):
    """Report that the order was carried out."""


class OrderFailed(msgspec.Struct, tag="failed"):
    """Report that the order failed, with the code, message and param of the error."""

    code: str
    message: str
    param: str | None = None


Order = Restart | Scale | Invite | Leave
Report = Callable[[str], None]

_orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
_answers: msgspec.json.Decoder[OrderProgress | OrderDone | OrderFailed] = msgspec.json.Decoder(
    OrderProgress | OrderDone | OrderFailed
)


def path_of(port: int) -> Path:
    """Return the path of the socket of the stack with this HTTP port."""
    return connection.folder() / f"{port}.sock"


@asynccontextmanager
async def serving_orders(
    path: Path, carry_out: Callable[[Order, Report], Awaitable[None]]
) -> AsyncIterator[None]:
    """Serve orders within the context. Raises ConfigError if the socket cannot be created."""
    order_server = _OrderServer(carry_out)
    try:
        server = await asyncio.start_unix_server(order_server.on_client, path, limit=_MAX_LINE)
    except OSError as error:
        raise ConfigError(
            f"XDG_RUNTIME_DIR: cannot listen on {path}: {error}; set it to a writable folder",
            param="XDG_RUNTIME_DIR",
        ) from None
    try:
        yield
    finally:
        server.close()
        await order_server.close()
        _remove(path)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)


class _OrderServer:
    def __init__(self, carry_out: Callable[[Order, Report], Awaitable[None]]):
        self._carry_out = carry_out
        self._busy = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def on_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if (task := asyncio.current_task()) is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        def report(answer: OrderProgress | OrderDone | OrderFailed) -> None:
            if not writer.is_closing():
                writer.write(msgspec.json.encode(answer) + b"\n")

        try:
            await self._handle(await reader.readline(), report)
        finally:
            with contextlib.suppress(OSError):
                writer.close()

    async def _handle(
        self, line: bytes, report: Callable[[OrderProgress | OrderDone | OrderFailed], None]
    ) -> None:
        try:
            order = _orders.decode(line)
            if self._busy:
                raise Unavailable("another order is being carried out; try again after it")
            self._busy = True
            try:
                await self._carry_out(order, lambda text: report(OrderProgress(text)))
            finally:
                self._busy = False
            report(OrderDone())
        except Exception as error:
            known = as_motet_error(error)
            report(OrderFailed(known.code, known.message, known.param))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def send_order(url: str, order: Order) -> Iterator[str]:
    """Send an order to the stack that serves `url` on this machine; yield its progress messages.

    Raises ConfigError if this user runs no such stack, or the error that the stack reports.
    """
    host, port = address.of_url(url)
    missing = ConfigError(
        f"--url: no `motet up` of this user serves {url}; give the URL that it printed",
        param="--url",
    )
    if not address.is_loopback(host):
        raise missing
    yield from send_to(path_of(port), order, missing)


def send_to(path: Path, order: Order, missing: ConfigError) -> Iterator[str]:
    """Send an order to a socket; yield its progress messages.

    Raises `missing` if none listens there, or the error that is reported.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        try:
            peer.connect(str(path))
        except OSError:
            raise missing from None
        peer.sendall(msgspec.json.encode(order) + b"\n")
        for line in peer.makefile("rb"):
            answer = _answers.decode(line)
            if isinstance(answer, OrderDone):
                return
            if isinstance(answer, OrderFailed):
                raise from_wire(answer.code, answer.message, param=answer.param)
            yield answer.text
    raise MotetError("its supervisor ended before the order was carried out")
