"""Decoders for tests of the decoding children: they do what a decoder that was taken over, or fooled, might do."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator

from motet_media.child import Payload, Task


def spin(data: bytes) -> Iterator[Payload]:
    """Compute for ever."""
    while len(data) < 1 << 40:
        pass
    yield {}, b""


def sleep(data: bytes) -> Iterator[Payload]:
    """Wait for ever, at no cost of processor time."""
    yield {"pid": os.getpid()}, b""
    while True:
        time.sleep(1)


def hoard(data: bytes, nbytes: int) -> Iterator[Payload]:
    """Take memory, and touch it."""
    yield {}, bytes(bytearray(nbytes)[:1])


def crash(data: bytes) -> Iterator[Payload]:
    """Die as of a wild pointer."""
    os.kill(os.getpid(), 11)
    yield {}, b""


def endless(data: bytes) -> Iterator[Payload]:
    """Make parts for ever."""
    number = 0
    while True:
        number += 1
        yield {"number": number}, bytes(1 << 20)


def look(data: bytes, path: str, port: int) -> Iterator[Payload]:
    """Tell what is in reach: modules, a file, a server, further processes."""
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
    """Try again after making room for descriptors, as only code of an attacker could."""
    os.close(0)
    yield {"read": _tried(lambda: open(path).close())}, b""
    yield (
        {"connected": _tried(lambda: socket.create_connection(("127.0.0.1", port), 1).close())},
        b"",
    )


def echo(data: bytes) -> Iterator[Payload]:
    """Give the input back."""
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
    """Load what is used later."""


TASKS: dict[str, Task] = {
    task.__name__: task
    for task in (spin, sleep, hoard, crash, endless, look, free_descriptors, echo)
}
