"""Clients that stop reading, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from chaos.conftest import MODEL
from chaos.streams import Outcome, Streams, request
from e2e.peer import service_stats
from e2e.stack import MotetStack

LONG = 20_000  # tokens: several times what the buffers between engine and client hold


class DeafClient:
    """Sends a request over a bare socket and reads nothing until told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def ask(cls, url: str, body: dict[str, Any]) -> DeafClient:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=4096)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        data = json.dumps(body).encode()
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        head = f"POST {path} HTTP/1.0\r\nHost: {host}\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
        return cls(reader, writer)

    async def listen(self) -> str:
        """The text of the whole stream."""
        self._writer.transport.resume_reading()  # type: ignore[attr-defined]
        text = ""
        while line := await self._reader.readline():
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:]).get("choices", ()):
                    text += choice.get("text") or ""
        return text

    async def leave(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


async def decode_stats(stack: MotetStack) -> list[dict[str, Any]]:
    instances = [str(child["instance"]) for child in stack.children("decode")]
    return [await service_stats(stack.nats_url, stack.password, instance) for instance in instances]


async def until_decode(
    stack: MotetStack, condition: Callable[[list[dict[str, Any]]], bool], seconds: float
) -> list[dict[str, Any]]:
    give_up = time.monotonic() + seconds
    while not condition(stats := await decode_stats(stack)):
        assert time.monotonic() < give_up, f"not within {seconds} s: {stats}"
        await asyncio.sleep(0.02)
    return stats


def idle(stats: list[dict[str, Any]]) -> bool:
    return all(entry["running"] + entry["waiting"] == 0 for entry in stats)


def all_free(stats: list[dict[str, Any]]) -> bool:
    return all(entry["blocks_free"] == entry["blocks_total"] for entry in stats)


async def test_who_does_not_read_slows_only_himself(
    stack: MotetStack, requests: list[dict[str, Any]], undisturbed: list[Outcome]
) -> None:
    body = request(1, MODEL, LONG)
    deaf = await DeafClient.ask(stack.url, body)
    await until_decode(stack, lambda stats: sum(entry["paused"] for entry in stats) == 1, 60)
    async with Streams(stack.url, requests) as streams:
        outcomes = await streams.finish()
    assert [outcome.same_as(due) for outcome, due in zip(outcomes, undisturbed, strict=True)] == [True] * len(outcomes)
    assert sum(entry["paused"] for entry in await decode_stats(stack)) == 1, "it waits, and no one else does"
    text = await asyncio.wait_for(deaf.listen(), 90)
    await deaf.leave()
    assert len(text.encode()) in (LONG, LONG + 2)
    assert text.startswith(undisturbed[1].text[:-1]), "the seed and the prompt are those of stream 1"


@pytest.mark.parametrize("phase", ["at once", "decoding", "paused"])
async def test_who_leaves_frees_what_he_held(phase: str, stack: MotetStack) -> None:
    await until_decode(stack, idle, 10)
    deaf = await DeafClient.ask(stack.url, request(1, MODEL, LONG))
    if phase != "at once":
        await until_decode(stack, lambda stats: not idle(stats), 30)
    if phase == "paused":
        await until_decode(stack, lambda stats: sum(entry["paused"] for entry in stats) == 1, 60)
    await deaf.leave()
    await until_decode(stack, lambda stats: idle(stats) and all_free(stats), 5)


async def test_leavers_free_their_blocks_while_others_run_on(
    stack: MotetStack, requests: list[dict[str, Any]], undisturbed: list[Outcome]
) -> None:
    async with Streams(stack.url, requests) as streams:
        await streams.reached(60)
        for task in streams.tasks[::2]:
            task.cancel()
        await until_decode(stack, lambda stats: sum(entry["running"] for entry in stats) <= len(requests) // 2, 5)
        await asyncio.gather(*streams.tasks, return_exceptions=True)
        outcomes = streams.outcomes[1::2]
    assert all(outcome.same_as(due) for outcome, due in zip(outcomes, undisturbed[1::2], strict=True))
    await until_decode(stack, lambda stats: idle(stats) and all_free(stats), 5)
