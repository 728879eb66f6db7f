"""Kill -9, and worse, of each process while 16 streams run."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from chaos.conftest import MODEL, TOKENS
from chaos.streams import Outcome, Streams, request
from e2e.stack import WAIT_SECONDS, MotetStack

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("chaos")]

Requests = list[dict[str, Any]]
EARLY = 40  # characters of each stream when the fault comes


@contextlib.asynccontextmanager
async def midway(stack: MotetStack, requests: Requests) -> AsyncIterator[Streams]:
    """All streams have begun and none is near its end."""
    async with Streams(stack.url, requests) as streams:
        await streams.reached(EARLY)
        assert not any(outcome.done for outcome in streams.outcomes), (
            "too few tokens for this machine"
        )
        yield streams


def billed(outcome: Outcome) -> dict[str, Any]:
    """Usage without what a prefix cache happened to hold."""
    return {
        name: count
        for name, count in (outcome.usage or {}).items()
        if name != "prompt_tokens_details"
    }


def differences(outcomes: list[Outcome], undisturbed: list[Outcome]) -> list[str]:
    """Streams that are not, to the letter, what they should be."""
    found = []
    for number, (outcome, due) in enumerate(zip(outcomes, undisturbed, strict=True)):
        if not outcome.same_as(due):
            at = next(
                (i for i, (a, b) in enumerate(zip(outcome.text, due.text, strict=False)) if a != b),
                None,
            )
            found.append(
                f"stream {number}: {len(outcome.text)} of {len(due.text)} characters, first difference at {at},"
                f" finish {outcome.finish}, error {outcome.error}, broken {outcome.broken!r}"
            )
        elif billed(outcome) != billed(due):
            found.append(f"stream {number}: usage {outcome.usage} instead of {due.usage}")
    return found


async def one_answer(stack: MotetStack) -> Outcome:
    async with Streams(stack.url, [request(0, MODEL, 5)]) as streams:
        return (await streams.finish())[0]


async def answers_within(stack: MotetStack, seconds: float) -> None:
    """A new request succeeds within this time; those before it may be refused, but must not hang."""
    give_up = time.monotonic() + seconds
    while (outcome := await one_answer(stack)).finish != "length":
        assert time.monotonic() < give_up, f"no new request works within {seconds} s: {outcome}"
        await asyncio.sleep(0.05)


@pytest.mark.long
def test_undisturbed_streams_are_whole(undisturbed: list[Outcome]) -> None:
    for outcome in undisturbed:
        assert (outcome.finish, outcome.error, outcome.broken) == ("length", None, "")
        assert outcome.usage is not None
        assert outcome.usage["completion_tokens"] == TOKENS
        assert len(outcome.text.encode()) in (
            TOKENS,
            TOKENS + 2,
        )  # half of a character at the end shows as U+FFFD
    assert len({outcome.text for outcome in undisturbed}) > len(undisturbed) // 2


@pytest.mark.long
async def test_nothing_happens_twice_the_same(
    stack: MotetStack, requests: Requests, undisturbed: list[Outcome]
) -> None:
    """The yardstick of all tests here: a second run, with other batches, says the same."""
    async with Streams(stack.url, requests[::-1]) as streams:
        assert not differences((await streams.finish())[::-1], undisturbed)


@pytest.mark.parametrize("victim", ["decode-1", "tokenizer-1"])
async def test_streams_through_a_killed_worker_go_on_elsewhere(
    victim: str, stack: MotetStack, requests: Requests, undisturbed: list[Outcome]
) -> None:
    async with midway(stack, requests) as streams:
        restarted = stack.kill(victim)
        outcomes = await streams.finish()
    assert not differences(outcomes, undisturbed)
    await asyncio.to_thread(restarted)


@pytest.mark.long
async def test_streams_through_a_hung_decode_go_on_elsewhere(
    stack: MotetStack, requests: Requests, undisturbed: list[Outcome]
) -> None:
    async with midway(stack, requests) as streams:
        stack.signal("decode-2", signal.SIGSTOP)
        try:
            outcomes = await streams.finish()
        finally:
            stack.signal("decode-2", signal.SIGCONT)
    assert not differences(outcomes, undisturbed)
    assert stack.child("decode-2")["state"] == "running"


@pytest.mark.long
async def test_a_killed_gateway_ends_its_sockets_and_comes_back(
    stack: MotetStack, requests: Requests
) -> None:
    async with midway(stack, requests) as streams:
        restarted = stack.kill("gateway")
        outcomes = await streams.finish(20)
    assert all(outcome.broken or outcome.error for outcome in outcomes), (
        "a cut stream must not look complete"
    )
    await asyncio.to_thread(restarted)
    await answers_within(stack, WAIT_SECONDS)
    assert (await one_answer(stack)).finish == "length"


@pytest.mark.long
async def test_all_reconnect_when_nats_comes_back(
    stack: MotetStack, requests: Requests, undisturbed: list[Outcome]
) -> None:
    before = {child["name"]: child["pid"] for child in stack.children() if child["role"] != "nats"}
    async with midway(stack, requests) as streams:
        await asyncio.to_thread(stack.kill("nats"))
        await answers_within(stack, 2.0)
        outcomes = await streams.finish()
    retryable = {"stream_gap", "worker_lost", "stream_broken", "unavailable"}
    for outcome, due in zip(outcomes, undisturbed, strict=True):
        said = outcome.error["code"] if outcome.error else None
        assert outcome.same_as(due) or (said in retryable and due.text.startswith(outcome.text)), (
            outcome
        )
    assert {
        child["name"]: child["pid"] for child in stack.children() if child["role"] != "nats"
    } == before


@pytest.mark.long
async def test_kills_in_a_row_are_survived(
    stack: MotetStack, requests: Requests, undisturbed: list[Outcome]
) -> None:
    """Decode and tokenizer of the same streams: what resumed once resumes again."""
    async with midway(stack, requests) as streams:
        stack.kill("tokenizer-2")
        await streams.reached(EARLY * 3)
        restarted = stack.kill("decode-2")
        outcomes = await streams.finish()
    assert not differences(outcomes, undisturbed)
    await asyncio.to_thread(restarted)


@pytest.mark.long
async def test_live_is_live_and_ready_says_what_is_missing(stack: MotetStack) -> None:
    """With every decode gone the gateway is alive but not ready, and lets no new request wait for ever.

    They are stopped: killed ones are back before they are missed."""
    decodes = ("decode-1", "decode-2")
    async with httpx.AsyncClient(base_url=stack.url, trust_env=False, timeout=20) as http:

        async def is_ready(due: int) -> None:
            async with asyncio.timeout(WAIT_SECONDS):
                while (await http.get("/health/ready", params={"model": MODEL})).status_code != due:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

        for name in decodes:
            stack.signal(name, signal.SIGSTOP)
        try:
            await is_ready(503)
            assert (await http.get("/health/ready")).status_code == 503, (
                "no other model serves here"
            )
            assert (await http.get("/health/live")).status_code == 200
            async with asyncio.timeout(WAIT_SECONDS):
                refused = await one_answer(stack)
            assert refused.error is not None
            assert refused.error["code"] == "unavailable"
        finally:
            for name in decodes:
                stack.signal(name, signal.SIGCONT)
        await is_ready(200)
        await answers_within(stack, WAIT_SECONDS)
