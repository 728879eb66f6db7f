"""Connections outlive their gateway, and nothing is left behind: every descriptor is counted."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from motet_fdstore.client import StoreClient
from motet_fdstore.frames import BadFrame, Frame, Kind, receive, send
from motet_fdstore.store import Store

MEMORY = b"what a gateway has written"


class Bench:
    """A store in this process, driven step by step, with its clock in our hands."""

    def __init__(self, folder: Path, **options: float):
        self.now = 0.0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.path = folder / "store.sock"
        self.store = Store([self.listener], self.path, clock=lambda: self.now, **options)  # type: ignore[arg-type]
        self.clients: list[socket.socket] = []
        self.gateways: list[StoreClient] = []

    def steps(self, count: int = 8) -> None:
        for _ in range(count):
            self.store.step(0.005)

    def connect(self) -> socket.socket:
        client = socket.create_connection(self.listener.getsockname())
        client.settimeout(5)
        self.clients.append(client)
        self.steps()
        return client

    def gateway(self) -> StoreClient:
        gateway = StoreClient(self.path)
        self.gateways.append(gateway)
        gateway.join()
        self.steps()
        return gateway

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for gateway in self.gateways:
            gateway.close()
        self.store.close()
        self.listener.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**options: float) -> Bench:
        made.append(Bench(tmp_path, **options))
        return made[-1]

    before = open_fds()
    yield make
    for one in made:
        one.close()
    assert open_fds() == before


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def memory() -> int:
    fd = os.memfd_create("test")
    os.write(fd, MEMORY)
    return fd


def given(gateway: StoreClient) -> Frame:
    frame = gateway.receive()
    assert frame is not None
    assert frame.kind is Kind.GIVE
    return frame


def closed(frame: Frame) -> None:
    for fd in frame.fds:
        os.close(fd)


def kept(gateway: StoreClient, bench: Bench) -> Frame:
    """Take a connection, and have its memory kept."""
    frame = given(gateway)
    fd = memory()
    gateway.keep(frame.id, fd)
    os.close(fd)
    bench.steps()
    return frame


def test_a_connection_outlives_its_gateway(bench: Callable[..., Bench]) -> None:
    at = bench()
    first, second = at.gateway(), None
    client = at.connect()
    frame = kept(first, at)
    os.write(frame.fds[0], b"half of ")
    closed(frame)
    first.close()  # as its death does
    at.steps()
    client.sendall(b"more")
    second = at.gateway()
    again = given(second)
    assert (again.id, again.deaths, len(again.fds)) == (frame.id, 1, 2)
    assert os.pread(again.fds[1], 100, 0) == MEMORY
    assert os.read(again.fds[0], 100) == b"more"
    os.write(again.fds[0], b"a reply")
    closed(again)
    assert client.recv(100) == b"half of a reply"
    second.drop(again.id)
    at.steps()
    assert client.recv(100) == b""
    assert not at.store.kept


def test_what_a_gateway_sent_before_its_death_counts(bench: Callable[..., Bench]) -> None:
    """With a connection unread, its socket is reset: what it had sent is read nevertheless."""
    at = bench()
    first = at.gateway()
    at.connect()
    frame = given(first)
    os.write(frame.fds[0], b"half")
    at.connect()  # given, and never read
    fd = memory()
    first.keep(frame.id, fd)
    os.close(fd)
    closed(frame)
    first.close()
    at.steps()
    second = at.gateway()
    again = [given(second), given(second)]
    (kept_one,) = (one for one in again if one.id == frame.id)
    assert os.pread(kept_one.fds[1], 100, 0) == MEMORY
    for one in again:
        closed(one)


def test_one_that_was_given_and_never_read_is_given_again(bench: Callable[..., Bench]) -> None:
    at = bench()
    first = at.gateway()
    at.connect()
    first.close()  # the message with the descriptor lies unread in its socket
    second = at.gateway()
    frame = given(second)
    assert len(frame.fds) == 1
    closed(frame)


def test_another_gateway_gets_them_at_once_and_the_least_busy_the_next(
    bench: Callable[..., Bench],
) -> None:
    at = bench()
    one, two = at.gateway(), at.gateway()
    for _ in range(6):
        at.connect()
    frames = [given(one) for _ in range(3)] + [given(two) for _ in range(3)]
    for frame in frames:
        closed(frame)
    one.close()
    at.steps()
    moved = [given(two) for _ in range(3)]
    assert {frame.id for frame in moved} == {frame.id for frame in frames[:3]}
    for frame in moved:
        closed(frame)
    with pytest.raises(BlockingIOError):
        two.receive()


def test_without_a_gateway_clients_wait_in_the_queue(bench: Callable[..., Bench]) -> None:
    at = bench()
    at.connect()
    assert not at.store.kept
    closed(given(at.gateway()))
    assert len(at.store.kept) == 1


def test_one_that_leaves_gets_nothing_and_its_end_is_no_death(bench: Callable[..., Bench]) -> None:
    at = bench()
    old, new = at.gateway(), None
    at.connect()
    closed(kept(old, at))
    old.leave()
    at.steps()
    new = at.gateway()
    at.connect()
    closed(given(new))
    old.close()
    at.steps()
    frame = given(new)
    assert (frame.deaths, len(frame.fds)) == (0, 2)
    closed(frame)


def test_a_request_that_kills_gateways_is_given_up(bench: Callable[..., Bench]) -> None:
    at = bench(max_deaths=3)
    gateway = at.gateway()
    client = at.connect()
    for deaths in range(3):
        frame = given(gateway)
        assert frame.deaths == deaths
        closed(frame)
        gateway.close()
        at.steps()
        gateway = at.gateway()
    assert not at.store.kept
    assert client.recv(10) == b""


def test_deaths_of_long_ago_are_forgotten(bench: Callable[..., Bench]) -> None:
    at = bench(max_deaths=2)
    gateway = at.gateway()
    at.connect()
    closed(given(gateway))
    for _ in range(4):
        at.now += 61.0
        at.gateways[-1].close()
        at.steps()
        closed(given(at.gateway()))
    assert len(at.store.kept) == 1


def test_a_connection_without_a_gateway_is_closed_in_the_end(bench: Callable[..., Bench]) -> None:
    at = bench(orphan_seconds=5.0)
    gateway = at.gateway()
    client = at.connect()
    closed(given(gateway))
    gateway.close()
    at.steps()
    at.now += 4.0
    at.steps()
    assert len(at.store.kept) == 1
    at.now += 2.0
    at.steps()
    assert not at.store.kept
    assert client.recv(10) == b""


def test_a_new_store_gets_what_the_gateways_have(tmp_path: Path) -> None:
    before = open_fds()
    old = Bench(tmp_path)
    gateway = old.gateway()
    client = old.connect()
    frame = given(gateway)
    gateway.close()
    old.store.close()
    new = Bench(tmp_path)
    gateway = new.gateway()
    fd = memory()
    gateway.put(frame.id, frame.fds[0], fd)
    os.close(fd)
    closed(frame)
    new.steps()
    gateway.close()
    new.steps()
    again = given(new.gateway())
    assert again.id == frame.id
    os.write(again.fds[0], b"lives")
    closed(again)
    assert client.recv(10) == b"lives"
    old.clients[0].close()
    old.listener.close()
    new.close()
    assert open_fds() == before


def test_no_more_than_the_most_are_accepted(bench: Callable[..., Bench]) -> None:
    at = bench(most=2)
    gateway = at.gateway()
    for _ in range(4):
        at.connect()
    frames = [given(gateway), given(gateway)]
    with pytest.raises(BlockingIOError):
        gateway.receive()
    gateway.drop(frames[0].id)
    at.steps()
    frames.append(given(gateway))
    for frame in frames:
        closed(frame)


@pytest.mark.parametrize(
    "packet",
    [b"x", b"x" * 16, b"MtFd\x02\x01\x00\x00" + bytes(8), b"MtFd\x01\x03\x00\x00" + bytes(8)],
    ids=["short", "magic", "version", "no descriptor"],
)
def test_a_packet_that_is_no_message_cuts_its_sender_off(
    packet: bytes, bench: Callable[..., Bench]
) -> None:
    at = bench()
    other = at.gateway()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(str(at.path))
        fd = memory()
        socket.send_fds(peer, [packet], [fd] if packet[5:6] != b"\x03" else [])
        os.close(fd)
        at.steps()
        peer.settimeout(5)
        assert peer.recv(10) == b""
    at.connect()
    closed(given(other))


def test_a_connection_is_passed_on_to_each_gateway_once_and_then_returned(
    bench: Callable[..., Bench],
) -> None:
    at = bench()
    first = at.gateway()
    client = at.connect()
    frame = kept(first, at)
    second, third, leaving = (at.gateway() for _ in range(3))
    leaving.leave()
    seen = []
    for gateway in (first, second, third):
        closed(frame)  # as who passes it on does
        gateway.pass_on(frame.id)
        at.steps()
        taker, again = next(
            (other, got) for other in (first, second, third) if (got := waiting(other)) is not None
        )
        seen.append((taker, again.kind))
        assert (again.id, again.deaths, len(again.fds)) == (frame.id, 0, 2)
        assert os.pread(again.fds[1], 100, 0) == MEMORY
        frame = again
    assert [kind for _, kind in seen] == [Kind.GIVE, Kind.GIVE, Kind.RETURN]
    assert {taker for taker, _ in seen[:2]} == {second, third}
    assert seen[2][0] is third
    assert waiting(leaving) is None
    assert [one.held for one in at.store._gateways] == [0, 0, 1, 0]
    os.write(frame.fds[0], b"not here")
    closed(frame)
    assert client.recv(100) == b"not here"


def test_after_a_death_a_connection_is_passed_on_to_all_again(bench: Callable[..., Bench]) -> None:
    """A session of the gateway that has died may be in one that has passed the connection on."""
    at = bench()
    first = at.gateway()
    at.connect()
    frame = kept(first, at)
    second = at.gateway()
    closed(frame)
    first.pass_on(frame.id)
    at.steps()
    closed(given(second))
    second.close()
    at.steps()
    third = at.gateway()
    closed(given(first))
    first.pass_on(frame.id)
    at.steps()
    closed(given(third))


def test_one_whose_memory_the_store_does_not_have_is_not_passed_on(
    bench: Callable[..., Bench],
) -> None:
    at = bench()
    first, second = at.gateway(), at.gateway()
    client = at.connect()
    frame = given(first)
    closed(frame)
    first.pass_on(frame.id)
    at.steps()
    assert waiting(second) is None
    assert client.recv(10) == b""
    assert not at.store.kept


def test_a_kind_of_a_later_release_is_ignored(bench: Callable[..., Bench]) -> None:
    at = bench()
    gateway = at.gateway()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.connect(str(at.path))
        peer.send(b"MtFd\x01\xc8\x00\x00" + bytes(8))
        at.steps()
        peer.setblocking(False)
        with pytest.raises(BlockingIOError):
            peer.recv(10)
    assert waiting(gateway) is None


def waiting(gateway: StoreClient) -> Frame | None:
    try:
        return gateway.receive()
    except BlockingIOError:
        return None


def test_a_gateway_cannot_touch_the_connections_of_another(bench: Callable[..., Bench]) -> None:
    at = bench()
    owner = at.gateway()
    at.connect()
    frame = kept(owner, at)
    closed(frame)
    other = at.gateway()
    other.drop(frame.id)
    other.pass_on(frame.id)
    fd = memory()
    other.keep(frame.id, fd)
    os.close(fd)
    at.steps()
    assert list(at.store.kept) == [frame.id]


def test_frames_survive_the_wire() -> None:
    one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with one, two:
        for kind, count in (
            (Kind.JOIN, 0),
            (Kind.GIVE, 2),
            (Kind.KEEP, 1),
            (Kind.PUT, 2),
            (Kind.PASS, 0),
            (Kind.RETURN, 2),
        ):
            fds = tuple(memory() for _ in range(count))
            send(one, Frame(kind, 2**63, 7, fds))
            got = receive(two)
            assert got is not None
            assert (got.kind, got.id, got.deaths, len(got.fds)) == (kind, 2**63, 7, count)
            for fd in (*fds, *got.fds):
                os.close(fd)
        one.send(b"?")
        with pytest.raises(BadFrame):
            receive(two)


def test_the_process_survives_its_gateways_and_ends_with_sigterm(tmp_path: Path) -> None:
    """A real process: it has what a killed one had, and its memory does not grow."""
    listener = socket.create_server(("127.0.0.1", 0))
    path = tmp_path / "s"
    argv = [sys.executable, "-m", "motet_fdstore", "--path", str(path)]
    argv += ["--listen-fd", str(listener.fileno()), "--max-deaths", "100"]
    process = subprocess.Popen(argv, pass_fds=[listener.fileno()])
    try:
        give_up = time.monotonic() + 20
        gateway = None
        while gateway is None:
            assert time.monotonic() < give_up
            with contextlib.suppress(OSError):
                gateway = StoreClient(path)
        gateway.join()
        with socket.create_connection(listener.getsockname(), 5) as client:
            fds: list[int] = []
            for number in range(20):
                frame = _wait(gateway)
                os.write(frame.fds[0], b"%2d" % number)
                closed(frame)
                if number == 0:
                    fd = memory()
                    gateway.keep(frame.id, fd)
                    os.close(fd)
                gateway.close()
                gateway = StoreClient(path)
                gateway.join()
                fds.append(len(os.listdir(f"/proc/{process.pid}/fd")))
            assert _read(client, 40) == b"".join(b"%2d" % number for number in range(20))
            assert max(fds[2:]) <= fds[2] + 1
            frame = _wait(gateway)
            closed(frame)
            gateway.drop(frame.id)
            assert client.recv(10) == b""
        gateway.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert not path.exists()
    finally:
        process.kill()
        process.wait()
        listener.close()


def _wait(gateway: StoreClient) -> Frame:
    give_up = time.monotonic() + 10
    while time.monotonic() < give_up:
        with contextlib.suppress(BlockingIOError):
            return given(gateway)
        time.sleep(0.005)
    raise TimeoutError("no connection was given")


def _read(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += client.recv(size)
    return data
