"""Kill -9 of gateways behind a descriptor store: clients that know nothing of it get every byte.

A reply is compared with the one of an undisturbed run by what it says (`kept_questions`); framing is checked to
the last byte.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import pytest

from chaos.kept_questions import BRUSH, KINDS, MODEL, Question, questions
from e2e import markov
from e2e.stack import MotetStack, speech, until
from support.checkpoints.diffusion_checkpoints import stable_diffusion

pytestmark = [pytest.mark.long, pytest.mark.timeout(900), pytest.mark.xdist_group("gateway_deaths")]


@dataclass(frozen=True)
class Reply:
    """The body of one response, and the longest time in which nothing of it came."""

    body: bytes
    pause: float


@pytest.fixture(scope="module")
def kept_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotetStack]:
    folder = tmp_path_factory.mktemp("kept")
    model = markov.save(folder / MODEL)
    brush = stable_diffusion(folder / BRUSH)
    others = (*speech(folder), "--draw", str(brush), "--no-store", "--keep-connections")
    with MotetStack(folder, "--llm", str(model), *others) as stack:
        stack.wait_until_all_ready()
        yield stack


def ask(url: str, asked: Question, *, is_slow: bool) -> Reply:
    """One that reads slowly holds a small window."""
    host, port = url.removeprefix("http://").split(":")
    data = asked.content
    with socket.socket() as client:
        if is_slow:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client.connect((host, int(port)))
        client.settimeout(300)
        head = f"POST {asked.path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
        head += f"Content-Type: {asked.content_type}\r\nContent-Length: {len(data)}"
        client.sendall(f"{head}\r\n\r\n".encode() + data)
        parts, pause, last = [], 0.0, time.monotonic()
        while part := client.recv(4096):
            pause, last = max(pause, time.monotonic() - last), time.monotonic()
            parts.append(part)
            time.sleep(0.01 * is_slow)
    return Reply(body_of(b"".join(parts)), pause)


def body_of(response: bytes) -> bytes:
    """The body of one complete response; raises if anything is not as HTTP has it."""
    head, _, rest = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), response[:500]
    if b"chunked" not in head:
        assert b"content-length: %d\r\n" % len(rest) in head.lower() + b"\r\n"
        return rest
    body = b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if not (count := int(size, 16)):
            assert rest == b"\r\n"
            return body
        body, rest = body + rest[:count], rest[count + 2 :]


class Clients:
    """All clients at the same time; every seventh reads slowly."""

    def __init__(self, url: str):
        self.questions = questions(2 * len(KINDS))
        self._url = url
        self._threads = ThreadPoolExecutor(len(self.questions))

    def begin(self) -> list[Future[Reply]]:
        return [
            self._threads.submit(ask, self._url, asked, is_slow=number % 7 == 6)
            for number, asked in enumerate(self.questions)
        ]

    def replies(self) -> list[Reply]:
        return [future.result() for future in self.begin()]

    def differing(self, replies: list[Reply], undisturbed: list[Reply]) -> list[str]:
        """Where replies of two runs do not say the same."""
        rows = zip(self.questions, replies, undisturbed, strict=True)
        return [one.path for one, a, b in rows if one.said(a.body) != one.said(b.body)]

    def check(
        self,
        replies: list[Reply],
        undisturbed: list[Reply],
        capsys: pytest.CaptureFixture[str],
        what: str,
    ) -> None:
        """Compare replies with those of an undisturbed run, and print the pauses of the streams.

        A whole reply comes at once, whatever happened before. Where replies differ, the failure says
        whether those of another undisturbed run do.
        """
        if differing := self.differing(replies, undisturbed):
            alone = self.differing(self.replies(), undisturbed)
            pytest.fail(f"{what}: {differing} differ; undisturbed, {alone or 'none'} do")
        rows = zip(self.questions, replies, strict=True)
        pauses = sorted(reply.pause for one, reply in rows if one.streams)
        with capsys.disabled():
            longest, median = pauses[-1], pauses[len(pauses) // 2]
            print(
                f"\n{what}: {len(replies)} replies equal; pauses of {len(pauses)} streams:"
                f" longest {longest:.2f} s, median {median:.2f} s"
            )


def scale(stack: MotetStack, count: int) -> None:
    command = [sys.executable, "-m", "motet_cli", "scale", f"gateway={count}", "--url", stack.url]
    subprocess.run(command, env=stack.env, check=True, timeout=120, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def clients(kept_stack: MotetStack) -> Clients:
    return Clients(kept_stack.url)


@pytest.fixture(scope="module")
def undisturbed(clients: Clients) -> list[Reply]:
    """What is said while nothing dies."""
    return clients.replies()


def test_replies_are_the_same_over_deaths_of_the_gateway(
    kept_stack: MotetStack,
    clients: Clients,
    undisturbed: list[Reply],
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = kept_stack.child("gateway")["pid"]
    futures = clients.begin()
    for _ in range(3):
        time.sleep(0.5)
        kept_stack.kill("gateway")()
        until(kept_stack.ready, "a gateway has adopted the connections")
    clients.check([future.result() for future in futures], undisturbed, capsys, "one gateway")
    assert kept_stack.child("gateway")["pid"] != before


def test_a_second_gateway_takes_over_at_once(
    kept_stack: MotetStack,
    clients: Clients,
    undisturbed: list[Reply],
    capsys: pytest.CaptureFixture[str],
) -> None:
    scale(kept_stack, 2)
    futures = clients.begin()
    time.sleep(0.5)
    restarted = kept_stack.kill("gateway-2")
    clients.check([future.result() for future in futures], undisturbed, capsys, "two gateways")
    restarted()
