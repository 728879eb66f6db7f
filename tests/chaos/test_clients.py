"""Clients that stop reading, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from chaos.conftest import MODEL
from chaos.streams import Outcome, Streams, request
from e2e.engines.peer import service_stats
from e2e.stack import MotetStack

pytestmark = [pytest.mark.long, pytest.mark.timeout(300), pytest.mark.xdist_group("chaos")]

TOKENS = 700
CHOICES = 8
# Over 1 KB per token, in all half as much again as the buffers between engine and client hold (4 MB are the kernel's).
FAT = request(0, MODEL, TOKENS) | {"n": CHOICES, "logprobs": True, "top_logprobs": 20}


class DeafClient:
    """Sends a request over a bare socket and reads nothing until told to. Leaves with the block at the latest."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    @contextlib.asynccontextmanager
    async def ask(cls, url: str, body: dict[str, Any]) -> AsyncIterator[DeafClient]:
        host, port = url.removeprefix("http://").split(":")
        peer = socket.create_connection((host, int(port)))
        peer.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, 8192
        )  # else the kernel listens in its place
        reader, writer = await asyncio.open_connection(sock=peer, limit=2**20)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        data = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.0\r\nHost: {host}\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        client = cls(reader, writer)
        try:
            yield client
        finally:
            await client.leave()

    async def listen(self) -> list[str]:
        """The texts of all choices of the whole stream."""
        peer = self._writer.get_extra_info("socket")
        peer.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, 2**20
        )  # a small window is slow as well
        self._writer.transport.resume_reading()  # type: ignore[attr-defined]
        texts = [""] * CHOICES
        while line := await self._reader.readline():
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:]).get("choices", ()):
                    texts[choice["index"]] += choice["delta"].get("content") or ""
        return texts

    async def leave(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


async def decode_stats(stack: MotetStack) -> list[dict[str, Any]]:
    instances = [str(child["instance"]) for child in stack.children("decode")]
    return [
        await service_stats(stack.nats_url, stack.passwords, instance) for instance in instances
    ]


async def until_decode(
    stack: MotetStack, condition: Callable[[list[dict[str, Any]]], bool], seconds: float
) -> list[dict[str, Any]]:
    give_up = time.monotonic() + seconds
    while not condition(stats := await decode_stats(stack)):
        assert time.monotonic() < give_up, f"not within {seconds} s: {stats}"
        await asyncio.sleep(0.1)
    return stats


def idle(stats: list[dict[str, Any]]) -> bool:
    return all(entry["running"] + entry["waiting"] == 0 for entry in stats)


def all_paused(stats: list[dict[str, Any]]) -> bool:
    return sum(entry["out_of_credit"] for entry in stats) == CHOICES


def all_free(stats: list[dict[str, Any]]) -> bool:
    return all(entry["blocks_free"] == entry["blocks_total"] for entry in stats)


async def test_who_does_not_read_slows_only_himself(
    stack: MotetStack, requests: list[dict[str, Any]], undisturbed: list[Outcome]
) -> None:
    async with DeafClient.ask(stack.url, FAT) as deaf:
        await until_decode(stack, all_paused, 60)
        async with Streams(stack.url, requests) as streams:
            outcomes = await streams.finish()
        assert all(outcome.same_as(due) for outcome, due in zip(outcomes, undisturbed, strict=True))
        assert all_paused(await decode_stats(stack)), "he waits, and no one else does"
        texts = await asyncio.wait_for(deaf.listen(), 120)
    assert all(len(text.encode()) in (TOKENS, TOKENS + 2) for text in texts)
    assert texts[0].startswith(undisturbed[0].text[:-1]), (
        "the seed and the prompt are those of stream 0"
    )


@pytest.mark.parametrize("phase", ["at once", "decoding", "paused"])
async def test_who_leaves_frees_what_he_held(phase: str, stack: MotetStack) -> None:
    await until_decode(stack, idle, 10)
    async with DeafClient.ask(stack.url, FAT):
        if phase == "decoding":
            await until_decode(stack, lambda stats: not idle(stats), 30)
        if phase == "paused":
            await until_decode(stack, all_paused, 60)
    await until_decode(stack, lambda stats: idle(stats) and all_free(stats), 5)


async def test_leavers_free_their_blocks_while_others_run_on(
    stack: MotetStack, requests: list[dict[str, Any]], undisturbed: list[Outcome]
) -> None:
    async with Streams(stack.url, requests) as streams:
        await streams.reached(40)
        for task in streams.tasks[::2]:
            task.cancel()
        await until_decode(
            stack, lambda stats: sum(entry["running"] for entry in stats) <= len(requests) // 2, 5
        )
        await asyncio.gather(*streams.tasks, return_exceptions=True)
        outcomes = streams.outcomes[1::2]
    assert all(
        outcome.same_as(due) for outcome, due in zip(outcomes, undisturbed[1::2], strict=True)
    )
    await until_decode(stack, lambda stats: idle(stats) and all_free(stats), 5)
