"""Kill -9 of gateways behind a descriptor store: clients that know nothing of it get every byte.

A reply is compared with the one of an undisturbed run: every character, log-probability and token of the usage. Where a
stream is cut into events differs between two undisturbed runs, too, so the events of a choice are joined. Framing is
checked to the last byte, and all events have one id and one second of creation.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from e2e import markov
from e2e.stack import MotetStack, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(400), pytest.mark.xdist_group("gateway_deaths")]

MODEL = "markov"
TOKENS = 500


@dataclass(frozen=True)
class Reply:
    """The body of one response, and the longest time in which nothing of it came."""

    body: bytes
    pause: float


@pytest.fixture(scope="module")
def kept_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotetStack]:
    folder = tmp_path_factory.mktemp("kept")
    model = markov.save(folder / MODEL)
    others = ("--asr", "none", "--tts", "none", "--vad", "0", "--no-store")
    with MotetStack(folder, "--llm", str(model), *others, "--keep-connections") as stack:
        stack.wait_until_all_ready()
        yield stack


def asked(number: int) -> tuple[str, dict[str, Any]]:
    """Chats and completions, streamed and whole, of one or several choices, some with log-probabilities."""
    body: dict[str, Any] = {
        "model": MODEL,
        "stream": number % 4 != 3,
        "temperature": number % 2,
        "seed": number,
        "max_tokens": TOKENS,
        "ignore_eos": True,
    }
    text = f"stream {number} says {'abcdefgh'[number % 8]}"
    if number % 3 == 2:
        return "/v1/completions", {**body, "prompt": text, "logprobs": 2}
    body |= {"messages": [{"role": "user", "content": text}], "n": 1 + (number % 5 == 4)}
    return "/v1/chat/completions", body


def ask(url: str, number: int) -> Reply:
    """Every seventh client reads slowly and holds a small window."""
    path, body = asked(number)
    host, port = url.removeprefix("http://").split(":")
    data = json.dumps(body).encode()
    is_slow = number % 7 == 6
    with socket.socket() as client:
        if is_slow:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client.connect((host, int(port)))
        client.settimeout(300)
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {len(data)}"
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


def said(reply: Reply) -> list[Any]:
    """What a reply says, by choice; raises unless it is complete, under one id and one time."""
    body = reply.body
    if not body.startswith(b"data: "):
        whole = json.loads(body)
        del whole["id"], whole["created"], whole["usage"]["prompt_tokens_details"]
        return [whole]
    *events, done = body.removesuffix(b"\n\n").split(b"\n\n")
    assert done == b"data: [DONE]"
    parsed = [json.loads(event.removeprefix(b"data: ")) for event in events]
    assert len({(one["id"], one["created"], one["model"], one["object"]) for one in parsed}) == 1
    choices: dict[int, list[Any]] = {}
    for one in parsed:
        for choice in one["choices"]:
            texts, scores, finish = choices.setdefault(choice["index"], ["", [], []])
            texts += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            scores += (choice["logprobs"] or {}).get("token_logprobs", [])
            finish += [choice["finish_reason"]] if choice["finish_reason"] else []
            choices[choice["index"]][0] = texts
    return [choices[index] for index in sorted(choices)]


def all_of(url: str, count: int) -> list[Reply]:
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(lambda number: ask(url, number), range(count)))


def differing(replies: list[Reply], undisturbed: list[Reply]) -> list[int]:
    pairs = zip(replies, undisturbed, strict=True)
    return [n for n, (a, b) in enumerate(pairs) if said(a) != said(b)]


def scale(stack: MotetStack, count: int) -> None:
    command = [sys.executable, "-m", "motet_cli", "scale", f"gateway={count}", "--url", stack.url]
    subprocess.run(command, env=stack.env, check=True, timeout=120, stdout=subprocess.DEVNULL)


def test_replies_are_the_same_over_deaths_of_the_gateway(
    kept_stack: MotetStack, capsys: pytest.CaptureFixture[str]
) -> None:
    count, stack = 21, kept_stack
    undisturbed = all_of(stack.url, count)
    assert not differing(all_of(stack.url, count), undisturbed), "the yardstick"
    before = stack.child("gateway")["pid"]
    with ThreadPoolExecutor(count) as threads:
        futures = [threads.submit(ask, stack.url, number) for number in range(count)]
        for _ in range(2):  # a third death within five minutes makes the supervisor wait
            time.sleep(0.5)
            stack.kill("gateway")()
            until(stack.ready, "a gateway has adopted the connections")
        replies = [future.result() for future in futures]
    assert not differing(replies, undisturbed)
    assert stack.child("gateway")["pid"] != before
    _report(capsys, "one gateway", replies)


def test_a_second_gateway_takes_over_at_once(
    kept_stack: MotetStack, capsys: pytest.CaptureFixture[str]
) -> None:
    count, stack = 21, kept_stack
    scale(stack, 2)
    undisturbed = all_of(stack.url, count)
    with ThreadPoolExecutor(count) as threads:
        futures = [threads.submit(ask, stack.url, number) for number in range(count)]
        time.sleep(0.5)
        restarted = stack.kill("gateway-2")
        replies = [future.result() for future in futures]
    assert not differing(replies, undisturbed)
    restarted()
    _report(capsys, "two gateways", replies)


def _report(capsys: pytest.CaptureFixture[str], what: str, replies: list[Reply]) -> None:
    """Print the pauses of the streams; a whole reply comes at once, whatever happened before."""
    streams = [reply for number, reply in enumerate(replies) if asked(number)[1]["stream"]]
    pauses = sorted(reply.pause for reply in streams)
    with capsys.disabled():
        longest, median = pauses[-1], pauses[len(pauses) // 2]
        print(
            f"\n{what}: {len(replies)} replies equal; pauses of {len(streams)} streams:"
            f" longest {longest:.2f} s, median {median:.2f} s"
        )
