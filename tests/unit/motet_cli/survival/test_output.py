"""Test that the output of a process outlives its reader, with real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from motet_cli.supervision.child import Child, ChildSpec
from motet_cli.survival.output import drop_backlog, lasting_pipe, open_output, spawn

# Prints a line for each signal, and how writing went, which an unread pipe would end.
ANSWERS = """
import signal, time
def answer(number, frame):
    print("again", flush=True)
signal.signal(signal.SIGUSR1, answer)
print("up", flush=True)
while True:
    time.sleep(600)
"""
FLOODS = """
import os
print("up", flush=True)
while True:
    os.write(1, b"x" * 4095 + b"\\n")
    os.write(int(os.environ["FD"]), b".")
"""


def spec(code: str, fd: int | None = None) -> ChildSpec:
    """Return the spec of a program that finds a descriptor's number in FD."""
    return ChildSpec(
        name="one",
        role="test",
        argv=(sys.executable, "-c", code),
        env={"FD": str(fd)},
        fds=() if fd is None else (fd,),
    )


async def until(lines: list[str], wanted: str) -> None:
    async with asyncio.timeout(20):
        while wanted not in lines:  # noqa: ASYNC110 - the process is another one
            await asyncio.sleep(0.01)


async def test_another_reader_goes_on() -> None:
    first: list[str] = []
    child = await Child.start(spec(ANSWERS), first.append, spawn)
    try:
        await until(first, "up")
        assert child._transport is not None
        child._transport._output.close()  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        os.kill(child.pid, signal.SIGUSR1)
        second: list[str] = []
        adopted = await Child.adopt(
            spec(ANSWERS),
            second.append,
            pid=child.pid,
            instance="test-1",
            pidfd=os.pidfd_open(child.pid),
            output=open_output(child.pid),
        )
        await until(second, "again")
        os.kill(child.pid, signal.SIGUSR1)
        await until(second, "again")
        assert adopted.exit_description == "running"
    finally:
        await child.kill()


async def test_a_process_has_its_descriptors_group_and_input() -> None:
    lines: list[str] = []
    reading, writing = os.pipe()
    code = (
        "import os, signal, sys; os.write(int(os.environ['FD']), b'here');"
        " print(os.getpgid(0) == os.getpid(), os.environ['MOTET_INSTANCE'], repr(sys.stdin.read()))"
    )
    child = await Child.start(spec(code, writing), lines.append, spawn)
    os.close(writing)
    assert await child.wait() == 0
    assert os.read(reading, 10) == b"here"
    assert os.read(reading, 10) == b""
    assert lines == [f"True {child.instance} ''"]
    os.close(reading)


async def test_a_command_that_does_not_exist_is_an_error() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FileNotFoundError):
        await Child.start(
            ChildSpec(name="ghost", role="test", argv=("/nowhere/at/all",)), print, spawn
        )
    assert len(os.listdir("/proc/self/fd")) == before


async def test_output_without_a_reader_is_dropped_before_it_blocks() -> None:
    lines: list[str] = []
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    child = await Child.start(spec(FLOODS, writing), lines.append, spawn)
    os.close(writing)
    try:
        await until(lines, "up")
        assert child._transport is not None
        child._transport._output.pause_reading()  # type: ignore[attr-defined]
        output = open_output(child.pid)
        written = 0
        async with asyncio.timeout(60):
            while written < 1000:  # four times what the pipe takes
                await asyncio.sleep(0.01)
                drop_backlog(output)
                try:
                    written += len(os.read(reading, 100_000))
                except BlockingIOError:
                    continue
        os.close(output)
    finally:
        await child.kill()
        os.close(reading)


def test_a_little_output_stays() -> None:
    reading, lasting = lasting_pipe()
    os.write(lasting, b"word")
    drop_backlog(reading)
    assert os.read(reading, 100) == b"word"
    os.write(lasting, b"x" * 700_000)
    drop_backlog(reading)
    os.set_blocking(reading, False)
    with pytest.raises(BlockingIOError):
        os.read(reading, 100)
    os.close(reading)
    os.close(lasting)
