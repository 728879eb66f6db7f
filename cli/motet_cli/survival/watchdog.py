"""End the services of a supervisor that has died: `python -m motet_cli.survival.watchdog`.

It keeps the listening socket of the stack meanwhile, and gives it to the next supervisor, so that no
client is refused. If none comes in time, all services end in the order in which a supervisor
ends them. The watchdog itself is one of the supervisor's processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import sys

from motet_cli.supervision import nats
from motet_cli.supervision.child import ChildSpec
from motet_cli.supervision.logs import Log
from motet_cli.survival.identity import open_pidfd
from motet_cli.survival.leftovers import end_stack
from motet_cli.survival.output import drop_backlog, open_output
from motet_cli.survival.record import ProcessRecord, StackFolder, StackRecord

ROLE = "watchdog"
_PERIOD = 0.25  # seconds between looks for the next supervisor
_TIMEOUT = 5.0  # seconds in which a watchdog gives away its socket


def spec(port: int, listen_fd: int) -> ChildSpec:
    """Return the spec of the watchdog of the stack on an HTTP port; it ends last."""
    argv = ("--port", str(port), "--listen-fd", str(listen_fd))
    return ChildSpec(
        name=ROLE,
        role=ROLE,
        argv=(sys.executable, "-m", "motet_cli.survival.watchdog", *argv),
        stage=nats.STAGE + 1,
        fds=(listen_fd,),
    )


def fetch_listener(folder: StackFolder) -> socket.socket | None:
    """Return the listening socket that the watchdog of a stack keeps; None if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(_TIMEOUT)
        try:
            peer.connect(str(folder.listener))
            _, fds, _, _ = socket.recv_fds(peer, 1, 1)
        except OSError:
            return None
    return socket.socket(fileno=fds[0]) if fds else None


async def _give_listener(server: socket.socket, listen_fd: int) -> None:
    """Send the listening socket to each process that connects."""
    loop = asyncio.get_running_loop()
    while True:
        peer, _ = await loop.sock_accept(server)
        with peer, contextlib.suppress(OSError):
            socket.send_fds(peer, [b"."], [listen_fd])


async def watch(folder: StackFolder, log: Log) -> None:
    """Return when the supervisor has died, no other one came in time, and all services are ended."""
    while True:
        record = folder.read()
        if record is None:  # the supervisor has ended everything
            return
        if (supervisor := open_pidfd(record.supervisor)) is not None:
            await _end_of(supervisor)
        elif not await _successor(folder, record):
            with folder.claimed() as alone:
                if alone:
                    log.note("no supervisor: ending all services")
                    await end_stack(folder, folder.read() or record, log)
                    return
            await asyncio.sleep(_PERIOD)  # the next supervisor has not written itself down yet


async def _end_of(pidfd: int) -> None:
    """Wait for the end of the process, and close its descriptor."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


async def _successor(folder: StackFolder, record: StackRecord) -> bool:
    """Return True when another supervisor has written itself down, False if the time is over.

    No service may wait for a reader of its output meanwhile: it would not serve.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    with contextlib.ExitStack() as exits:
        outputs = [output for output in map(_output_of, record.processes) if output is not None]
        for output in outputs:
            exits.callback(os.close, output)
        while not record.stopping and loop.time() - began < record.orphan_seconds:
            await asyncio.sleep(_PERIOD)
            for output in outputs:
                drop_backlog(output)
            now = folder.read()
            if now is not None and now.supervisor != record.supervisor:
                return True
    return False


def _output_of(found: ProcessRecord) -> int | None:
    try:
        return open_output(found.identity.pid)
    except OSError:  # it has ended
        return None


async def _run(folder: StackFolder, listen_fd: int, log: Log) -> None:
    folder.listener.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(folder.listener))
        server.listen()
        server.setblocking(False)
        giving = asyncio.create_task(_give_listener(server, listen_fd), name="give listener")
        try:
            await watch(folder, log)
        finally:
            giving.cancel()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True, help="HTTP port of the stack")
    parser.add_argument("--listen-fd", type=int, required=True, help="its listening socket")
    args = parser.parse_args(argv)
    log = Log(sys.stdout)
    try:
        asyncio.run(_run(StackFolder(args.port), args.listen_fd, log))
    finally:
        log.close()


if __name__ == "__main__":
    main()
