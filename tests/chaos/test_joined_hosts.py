"""A second host joins a stack over TLS, serves its streams, leaves, and dies: no reply is broken or changed.

Hosts are network namespaces, whose shared memory is their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from chaos.streams import Outcome, Streams, request
from e2e import markov
from e2e.stack import START_SECONDS, MotetStack, fetch, until
from support.peers.network_hosts import Cable, Host, missing, two_hosts

pytestmark = [
    pytest.mark.long,
    pytest.mark.namespaces,
    pytest.mark.timeout(1500),
    pytest.mark.xdist_group("joined_hosts"),
]

MODEL, STREAMS, TOKENS = "markov", 12, 300
START = 2 * START_SECONDS  # both hosts start on one machine
PAUSE = 20.0  # seconds that a stream may pause on a machine that is busy with other things
REQUESTS = [request(number, MODEL, TOKENS) for number in range(STREAMS)]
NOT_NEEDED = (
    *("--asr", "none", "--tts", "none", "--vad", "0", "--film", "none"),
    *("--no-store", "--no-nursery"),
)
JOINED = ("--services", "decode", "--no-nursery")


class Second:
    """Run `motet join` and `motet leave` on the second host."""

    def __init__(self, host: Host, folder: Path):
        self.host, self._folder = host, folder
        self._mark = secrets.token_hex(16)
        paths = os.pathsep.join(path for path in sys.path if path)
        self._env = {
            **os.environ,
            "PYTHONPATH": paths,
            "MOTET_TEST_MARK": self._mark,
            "XDG_STATE_HOME": str(folder / "s"),
            "XDG_RUNTIME_DIR": str(folder / "r"),
        }
        self.log_file = folder / "join.log"
        self.process: subprocess.Popen[bytes] | None = None

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._argv(words), env=self._env, capture_output=True, text=True, timeout=200
        )

    def start(self, *words: str) -> None:
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                self._argv(words), env=self._env, stdout=log, stderr=subprocess.STDOUT
            )

    def _argv(self, words: tuple[str, ...]) -> list[str]:
        return [*self.host.enter, sys.executable, "-m", "motet_cli", *words]

    @property
    def has_joined(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """SIGKILL to all its processes at once."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("MOTET_TEST_MARK") == self._mark:
                    process.send_signal(signal.SIGKILL)
        if self.process is not None:
            self.process.wait(30)


class TwoHosts:
    """A stack on the first host, which the second joins when a test needs it."""

    def __init__(self, stack: MotetStack, second: Second, cable: Cable):
        self.stack, self.second, self.cable = stack, second, cable

    def streams(self) -> Streams:
        return Streams(self.stack.url, REQUESTS)

    async def answered(self) -> list[Outcome]:
        async with self.streams() as streams:
            return await streams.finish()

    def command(self) -> list[str]:
        """Return the words behind `motet` of a new invitation."""
        argv = [sys.executable, "-m", "motet_cli", "invite", "--url"]
        url = f"http://127.0.0.1:{self.stack.url.rpartition(':')[2]}"
        done = subprocess.run(
            [*argv, url], env=self.stack.env, capture_output=True, text=True, timeout=100
        )
        assert done.returncode == 0, done.stderr
        return shlex.split(done.stdout)[1:]

    def join(self) -> None:
        """Let the second host join, if it has not, and wait until it takes work."""
        if not self.second.has_joined:
            self.second.start(*self.command(), *JOINED)
        self.wait()

    def wait(self) -> None:
        """Wait until the second host takes work."""
        try:
            until(self.second_is_ready, "the second host takes work", START)
        except BaseException as error:
            error.add_note(self.second.log_file.read_text()[-4000:])
            raise

    def second_is_ready(self) -> bool:
        if not self.second.has_joined:
            raise RuntimeError("motet join has ended")
        return len(self.decoders()) == 2

    def round_trip(self) -> float:
        """Return the seconds that a connection from the second host to the first's NATS takes."""
        code = (
            "import socket, sys, time; start = time.monotonic();"
            " socket.create_connection((sys.argv[1], 4222), 10); print(time.monotonic() - start)"
        )
        argv = [*self.second.host.enter, sys.executable, "-c", code, self.cable.addresses[0]]
        return float(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)

    def decoders(self) -> list[dict[str, Any]]:
        """Return the decode workers that the gateway knows as ready."""
        found = fetch(f"{self.stack.url}/metrics/stack").json()["instances"]
        return [one for one in found if one["role"] == "decode" and one["state"] == "ready"]

    async def at_second(self) -> float:
        """Return the calls that run on the second host, as told after this call."""
        await asyncio.sleep(0.7)
        own = self.stack.children("decode")[0]["instance"]
        others = [one for one in self.decoders() if one["instance"] != own]
        return sum(one["load"].get("active", 0.0) for one in others)


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    if reason := missing():
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(prefix="mj") as name, two_hosts() as (first, host, cable):
        folder = Path(name)  # a short path, for sockets in it
        model = markov.save(folder / MODEL)
        for part in ("a", "b", "a/r", "b/r"):
            (folder / part).mkdir(mode=0o700)
        env = {"XDG_RUNTIME_DIR": str(folder / "a/r"), "XDG_STATE_HOME": str(folder / "a/s")}
        flags = ("--host", first.outside, "--insecure", "--listen", first.address)
        second = Second(host, folder / "b")
        with MotetStack(
            folder / "a",
            *("--llm", str(model), *NOT_NEEDED, *flags),
            env=env,
            start_seconds=START,
            prefix=first.enter,
        ) as stack:
            try:
                yield TwoHosts(stack, second, cable)
            finally:
                second.kill()


@pytest.fixture(scope="module")
def undisturbed(hosts: TwoHosts) -> list[Outcome]:
    """What the streams say at the first host alone."""
    assert not hosts.second.has_joined
    found = asyncio.run(hosts.answered())
    assert all(one.finish == "length" for one in found)
    return found


@pytest.fixture
def joined(hosts: TwoHosts, undisturbed: list[Outcome]) -> TwoHosts:
    hosts.join()
    return hosts


def check(found: list[Outcome], undisturbed: list[Outcome], what: str) -> None:
    pause = max(one.longest_pause for one in found)
    print(f"{what}: longest pause {pause:.2f} s")
    assert all(map(Outcome.same_as, found, undisturbed)), what
    assert pause <= PAUSE


async def test_the_second_host_serves_streams_over_a_slow_cable_too(
    joined: TwoHosts, undisturbed: list[Outcome]
) -> None:
    for rate in ("", "1mbit"):
        if rate:
            joined.cable.slow(rate)
        try:
            async with joined.streams() as streams:
                await streams.reached(20)
                assert await joined.at_second() >= 2
                check(await streams.finish(), undisturbed, rate or "a free cable")
        finally:
            joined.cable.free()


async def test_hosts_that_are_50_ms_apart_serve_the_same_replies(
    joined: TwoHosts, undisturbed: list[Outcome]
) -> None:
    """The line is there under connections that exist, and new ones are made over it."""
    with joined.cable.delayed(0.05):
        assert joined.round_trip() >= 0.1
        async with joined.streams() as streams:
            await streams.reached(20)
            assert await joined.at_second() >= 2
            check(await streams.finish(), undisturbed, "50 ms each way")


async def test_a_cut_cable_moves_streams_and_the_host_comes_back(
    joined: TwoHosts, undisturbed: list[Outcome]
) -> None:
    assert joined.second.process is not None
    pid = joined.second.process.pid
    async with joined.streams() as streams:
        await streams.reached(20)
        assert await joined.at_second() >= 2
        with joined.cable.cut():
            check(await streams.finish(), undisturbed, "a cut cable")
    await asyncio.to_thread(joined.wait)
    assert joined.second.process.pid == pid
    check(await joined.answered(), undisturbed, "behind the cut")


async def test_leave_moves_streams_and_forgets_the_stack(
    joined: TwoHosts, undisturbed: list[Outcome]
) -> None:
    process = joined.second.process
    assert process is not None
    async with joined.streams() as streams:
        await streams.reached(20)
        assert await joined.at_second() >= 2
        left = await asyncio.to_thread(joined.second.run, "leave", "--drain", "0.2")
        assert left.returncode == 0, left.stderr
        check(await streams.finish(), undisturbed, "motet leave")
    assert await asyncio.to_thread(process.wait, 60) == 0
    assert len(joined.decoders()) == 1
    where = joined.command()[1]
    again = await asyncio.to_thread(joined.second.run, "join", where)
    assert again.returncode == 2, "its certificate and passwords are gone"


async def test_a_host_that_dies_takes_no_stream_with_it(
    joined: TwoHosts, undisturbed: list[Outcome]
) -> None:
    async with joined.streams() as streams:
        await streams.reached(20)
        assert await joined.at_second() >= 2
        with joined.cable.cut():
            joined.second.kill()
            check(await streams.finish(), undisturbed, "a dead host")
    # It comes back by itself: what it has of the stack is still there.
    where = joined.command()[1]
    joined.second.start("join", where, *JOINED)
    await asyncio.to_thread(joined.wait)
