"""Gateways are killed with signal 9 while their clients read and write; each client gets every byte, once.

Processes are real: a descriptor store, and two workers that serve without other services.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.services.kept_worker import plain, word

pytestmark = [pytest.mark.timeout(180), pytest.mark.xdist_group("kept")]

KILLS = 4
WORKER = "support.services.kept_worker"


class Workers:
    """A store and workers on its connections, each at most `most`; `kill` replaces one."""

    def __init__(self, folder: Path, count: int, most: int = 8192):
        self.most = most
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.path = folder / "front.sock"
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        self.store = self.start_store()
        self.running = [self._start() for _ in range(count)]

    def start_store(self) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "motet_fdstore", "--path", str(self.path)]
        argv += ["--listen-fd", str(self.listener.fileno()), "--max-deaths", "1000"]
        return subprocess.Popen(argv, pass_fds=[self.listener.fileno()], env=self.environment)

    def _start(self) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", WORKER, str(self.path), str(self.most)]
        return subprocess.Popen(argv, env=self.environment, stdout=subprocess.PIPE)

    def wait(self) -> None:
        for worker in self.running:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"ready\n"

    def kill(self, number: int = 0, *, replace: bool = True) -> None:
        """Kill a worker, once another has started in its place."""
        if replace:
            new = self._start()
            assert new.stdout is not None
            assert new.stdout.readline() == b"ready\n"
            self.running.append(new)
        old = self.running.pop(number)
        old.kill()
        old.wait()
        assert old.stdout is not None
        old.stdout.close()

    def fds(self) -> int:
        return len(os.listdir(f"/proc/{self.store.pid}/fd"))

    def close(self) -> None:
        for process in (*self.running, self.store):
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self.listener.close()

    # ---------------------------------------------------------------------------------------------------- clients
    def connect(self) -> socket.socket:
        client = socket.create_connection(self.listener.getsockname())
        client.settimeout(60)
        return client

    def ask(self, target: str, *, slow: float = 0.0, body: bytes = b"") -> bytes:
        """The whole response on a connection of its own."""
        with self.connect() as client:
            client.sendall(head(target, len(body), b"connection: close\r\n") + body)
            return read_all(client, slow)


def head(target: str, length: int = 0, more: bytes = b"") -> bytes:
    fields = b"host: localhost\r\ncontent-length: %d\r\n" % length
    return b"POST %b HTTP/1.1\r\n" % target.encode() + fields + more + b"\r\n"


def read_all(client: socket.socket, slow: float = 0.0) -> bytes:
    got = []
    while data := client.recv(16_384 if slow else 65_536):
        got.append(data)
        if slow:
            time.sleep(slow)
    return b"".join(got)


def body_of(response: bytes) -> bytes:
    """The body of one response and nothing behind it; raises if it is not well-formed to its last byte."""
    fields, _, rest = response.partition(b"\r\n\r\n")
    assert fields.startswith(b"HTTP/1.1 200 OK\r\n"), fields
    assert fields.count(b"HTTP/1.1") == 1
    if b"transfer-encoding: chunked" not in fields:
        (length,) = (f for f in fields.split(b"\r\n") if f.startswith(b"content-length:"))
        assert len(rest) == int(length.split(b":")[1])
        return rest
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        count = int(size, 16)
        if not count:
            assert rest == b"\r\n"
            return body
        body += rest[:count]
        assert rest[count : count + 2] == b"\r\n"
        rest = rest[count + 2 :]


def check_stream(response: bytes, seed: int, tokens: int, choices: int) -> None:
    """Every token of every choice, once and in order, under one id and one time."""
    *events, done = body_of(response).removesuffix(b"\n\n").split(b"\n\n")
    assert done == b"data: [DONE]"
    parsed: list[dict[str, Any]] = [json.loads(event.removeprefix(b"data: ")) for event in events]
    assert len({(one["id"], one["created"], one["seed"]) for one in parsed}) == 1
    for choice in range(choices):
        texts = [one["text"] for one in parsed if one["choice"] == choice]
        assert texts == [word(seed, choice, number) for number in range(tokens)]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    made = Workers(tmp_path_factory.mktemp("kept"), 2)
    try:
        made.wait()
        yield made
    finally:
        made.close()


@pytest.fixture
def workers(pool: Workers) -> Iterator[Workers]:
    """Two workers; afterwards the store has no descriptor more than before."""
    before = pool.fds()
    yield pool
    give_up = time.monotonic() + 10
    while pool.fds() > before:
        assert time.monotonic() < give_up, f"{pool.fds() - before} descriptors are left"
        time.sleep(0.02)


@contextlib.contextmanager
def kills(workers: Workers, count: int = KILLS, every: float = 0.25) -> Iterator[None]:
    """Kill workers during the block."""
    over = threading.Event()

    def run() -> None:
        for _ in range(count):
            if over.wait(every):
                return
            workers.kill()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def together(jobs: Sequence[Callable[[], bytes]]) -> list[bytes]:
    with ThreadPoolExecutor(len(jobs)) as threads:
        return [future.result() for future in [threads.submit(job) for job in jobs]]


@pytest.mark.parametrize("choices", [1, 3])
def test_streams_go_on_at_the_very_byte(choices: int, workers: Workers) -> None:
    tokens = 900
    targets = [f"/stream?seed={n}&tokens={tokens}&choices={choices}&size=0" for n in range(8)]
    with kills(workers):
        replies = together([partial(workers.ask, at) for at in targets])
    for seed, reply in enumerate(replies):
        check_stream(reply, seed, tokens, choices)


def test_head_of_a_stream_has_no_body(workers: Workers) -> None:
    target = "/stream?seed=1&tokens=20&choices=1&size=0"
    with workers.connect() as client:
        client.sendall(head(target).replace(b"POST", b"HEAD", 1))
        got = b""
        while b"\r\n\r\n" not in got:
            got += client.recv(65_536)
        client.sendall(head(target, more=b"connection: close\r\n"))
        first, _, rest = (got + read_all(client)).partition(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200")
    check_stream(rest, 1, 20, 1)


def test_slow_readers_with_megabytes_unread_lose_nothing(workers: Workers) -> None:
    """Their bytes lie in the kernel, and behind it in the memory, which is compacted meanwhile."""
    targets = [f"/stream?seed={n}&tokens=150&choices=1&size=40000" for n in range(3)]
    with kills(workers, every=0.5):
        replies = together([partial(workers.ask, at, slow=0.002) for at in targets])
    for seed, reply in enumerate(replies):
        check_stream(reply, seed, 150, 1)


def test_whole_bodies_are_whole(workers: Workers) -> None:
    """Small ones on one connection, and some of 5 MB that are read slowly."""

    def many(seed: int) -> bytes:
        with workers.connect() as client:
            for number in range(20):
                client.sendall(head(f"/plain?seed={seed + number}&size=1000"))
                response = b""
                while len(response.partition(b"\r\n\r\n")[2]) < 1000:
                    response += client.recv(65536)
                assert body_of(response) == plain(seed + number, 1000)
        return b""

    size = 5_000_000
    large = [partial(workers.ask, f"/plain?seed={n}&size={size}", slow=0.002) for n in range(2)]
    small = [partial(many, 100 * n) for n in range(4)]
    with kills(workers):
        replies = together([*large, *small])
    for seed in range(2):
        assert body_of(replies[seed]) == plain(seed, size)


def test_uploads_in_progress_go_on(workers: Workers) -> None:
    def upload(seed: int, *, chunked: bool) -> bytes:
        body = plain(seed, 1_500_000)
        with workers.connect() as client:
            if chunked:
                fields = b"host: localhost\r\ntransfer-encoding: chunked\r\nconnection: close\r\n"
                client.sendall(b"POST /upload HTTP/1.1\r\n" + fields + b"\r\n")
            else:
                client.sendall(head("/upload", len(body), b"connection: close\r\n"))
            rnd = random.Random(seed)
            while body:
                part, body = body[: (cut := rnd.randrange(1, 30_000))], body[cut:]
                client.sendall(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
                time.sleep(0.005)
            if chunked:
                client.sendall(b"0\r\n\r\n")
            return body_of(read_all(client))

    with kills(workers):
        jobs = [partial(upload, n, chunked=bool(n % 2)) for n in range(6)]
        replies = together(jobs)
    for seed, reply in enumerate(replies):
        assert reply == hashlib.sha256(plain(seed, 1_500_000)).hexdigest().encode()


@pytest.mark.long
def test_one_that_waits_for_100_continue_is_told_once(workers: Workers) -> None:
    body = plain(5, 100_000)
    with workers.connect() as client:
        more = b"expect: 100-continue\r\nconnection: close\r\n"
        client.sendall(head("/upload", len(body), more))
        assert client.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body[:50_000])
        time.sleep(0.1)
        workers.kill(0)
        workers.kill(0)
        client.sendall(body[50_000:])
        assert body_of(read_all(client)) == hashlib.sha256(body).hexdigest().encode()


def test_what_cannot_go_on_breaks_and_shows_no_wrong_byte(workers: Workers) -> None:
    with workers.connect() as client:
        client.sendall(head("/unjournaled"))
        got = client.recv(65536)
        workers.kill(0)
        workers.kill(0)
        with contextlib.suppress(ConnectionResetError):
            got += read_all(client)
    rest = got.partition(b"\r\n\r\n")[2]
    assert not got.endswith(b"0\r\n\r\n")
    lines = [part for part in rest.split(b"\r\n")[1::2] if part]
    assert b"".join(lines).split() == [b"%d" % number for number in range(len(lines))]


@pytest.mark.long
def test_a_gateway_that_can_make_no_memory_serves_without_keeping(workers: Workers) -> None:
    """No file may grow: what is kept for a connection is a file in memory."""
    limits = [resource.prlimit(one.pid, resource.RLIMIT_FSIZE) for one in workers.running]
    try:
        for one, (_, most) in zip(workers.running, limits, strict=True):
            resource.prlimit(one.pid, resource.RLIMIT_FSIZE, (0, most))
        targets = [f"/stream?seed={n}&tokens=50&choices=1&size=0" for n in range(4)]
        for seed, reply in enumerate(together([partial(workers.ask, at) for at in targets])):
            check_stream(reply, seed, 50, 1)
    finally:
        for one, limit in zip(workers.running, limits, strict=True):
            resource.prlimit(one.pid, resource.RLIMIT_FSIZE, limit)
    with kills(workers):
        reply = workers.ask("/stream?seed=9&tokens=900&choices=1&size=0")
    check_stream(reply, 9, 900, 1)


def test_a_client_that_leaves_meanwhile_leaves_nothing(workers: Workers) -> None:
    client = workers.connect()
    client.sendall(head("/stream?seed=1&tokens=100000&choices=1&size=100"))
    client.recv(1000)
    workers.kill(0)
    client.close()
    workers.kill(0)


@pytest.mark.long
def test_idle_connections_are_used_again(workers: Workers) -> None:
    with workers.connect() as client:
        for number in range(3):
            client.sendall(head(f"/plain?seed={number}&size=10"))
            response = b""
            while len(response.partition(b"\r\n\r\n")[2]) < 10:
                response += client.recv(65536)
            assert body_of(response) == plain(number, 10)
            workers.kill(0)
            workers.kill(0)


def test_without_any_worker_clients_wait_for_the_next(workers: Workers) -> None:
    targets = [f"/stream?seed={n}&tokens=300&choices=1&size=0" for n in range(4)]
    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(workers.ask, target) for target in targets]
        time.sleep(0.3)
        workers.kill(0, replace=False)
        workers.kill(0, replace=False)
        time.sleep(0.2)
        workers.running = [workers._start(), workers._start()]
        workers.wait()
        for seed, future in enumerate(futures):
            check_stream(future.result(), seed, 300, 1)


def test_a_connection_that_another_gateway_has_served_is_not_refused(tmp_path: Path) -> None:
    workers = Workers(tmp_path, 2, most=3)
    try:
        workers.wait()
        targets = [f"/stream?seed={n}&tokens=900&choices=1&size=0" for n in range(4)]
        with ThreadPoolExecutor(4) as threads:
            futures = [threads.submit(workers.ask, target) for target in targets]
            time.sleep(0.5)
            workers.kill(0, replace=False)
            assert workers.ask("/plain?seed=1&size=10").startswith(b"HTTP/1.1 503 ")
            for seed, future in enumerate(futures):
                check_stream(future.result(), seed, 900, 1)
    finally:
        workers.close()


def test_the_death_of_the_store_is_not_noticed(workers: Workers) -> None:
    """Connections go on without it, and the next store has them: a worker's death is survived behind it."""
    targets = [f"/stream?seed={n}&tokens=1500&choices=1&size=0" for n in range(4)]
    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(workers.ask, target) for target in targets]
        time.sleep(0.3)
        workers.store.kill()
        workers.store.wait()
        workers.store = workers.start_store()
        time.sleep(1.0)
        workers.kill(0)
        workers.kill(0)
        for seed, future in enumerate(futures):
            check_stream(future.result(), seed, 1500, 1)
