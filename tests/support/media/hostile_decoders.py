"""Define decoders that behave as if compromised, for tests of the sandboxed decoding processes."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator

from motet_media.child import Payload, Task


def spin(data: bytes) -> Iterator[Payload]:
    """Compute without end."""
    while len(data) < 1 << 40:
        pass
    yield {}, b""


def sleep(data: bytes) -> Iterator[Payload]:
    """Wait without end or CPU time."""
    yield {"pid": os.getpid()}, b""
    while True:
        time.sleep(1)


def hoard(data: bytes, nbytes: int) -> Iterator[Payload]:
    """Allocate memory and touch it."""
    yield {}, bytes(bytearray(nbytes)[:1])


def crash(data: bytes) -> Iterator[Payload]:
    """Die of an invalid pointer."""
    os.kill(os.getpid(), 11)
    yield {}, b""


def endless(data: bytes) -> Iterator[Payload]:
    """Produce parts without end."""
    number = 0
    while True:
        number += 1
        yield {"number": number}, bytes(1 << 20)


def look(data: bytes, path: str, port: int) -> Iterator[Payload]:
    """Report what is reachable: modules, a file, a server, further processes."""
    yield {"torch": int("torch" in sys.modules), "secret": int("MOTET_SECRET" in os.environ)}, b""
    yield {"read": _tried(lambda: open(path).close())}, b""
    yield {"written": _tried(lambda: open(path + ".new", "w").close())}, b""
    yield (
        {"connected": _tried(lambda: socket.create_connection(("127.0.0.1", port), 1).close())},
        b"",
    )
    yield {"bound": _tried(lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close())}, b""
    yield {"forked": _tried(_fork)}, b""


def free_descriptors(data: bytes, path: str, port: int) -> Iterator[Payload]:
    """Retry after closing descriptors, as only an attacker's code would."""
    os.close(0)
    yield {"read": _tried(lambda: open(path).close())}, b""
    yield (
        {"connected": _tried(lambda: socket.create_connection(("127.0.0.1", port), 1).close())},
        b"",
    )


def echo(data: bytes) -> Iterator[Payload]:
    """Return the input."""
    yield {"pid": os.getpid()}, data


def _fork() -> None:
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _tried(step: Callable[[], object]) -> int:
    try:
        step()
    except OSError:
        return 0
    return 1


def warm() -> None:
    """Import modules that are used later."""


TASKS: dict[str, Task] = {
    task.__name__: task
    for task in (spin, sleep, hoard, crash, endless, look, free_descriptors, echo)
}
