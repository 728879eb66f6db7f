"""The wire protocol, spoken by a client that shares no code with us, under the permissions of its role."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from e2e.engines.peer import Peer, heartbeats
from e2e.stack import ASR_MODEL, ENDLESS, VOICE, MotetStack

pytestmark = [pytest.mark.long, pytest.mark.timeout(300), pytest.mark.xdist_group("stack")]
SAMPLING = {"temperature": 0.0, "seed": 1}


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {
        "type": "chat",
        "model": "pocket-chat",
        "messages": [{"role": "user", "content": text}],
        "sampling": SAMPLING,
        **fields,
    }


def text_of(frames: list[list[Any]]) -> str:
    return "".join(frame[3][1] for frame in frames if frame[0] == "i")


def ids_of(frames: list[list[Any]]) -> list[int]:
    return [token for frame in frames if frame[0] == "i" for token in frame[3][2]]


async def something_comes(peer: Peer, stream: int, seconds: float = 3.0) -> bool:
    try:
        await peer.next(stream, seconds)
    except TimeoutError:
        return False
    return True


async def test_a_chat_is_accepted_streamed_and_ended(stack: MotetStack) -> None:
    async with Peer.connect(stack.nats_url, stack.passwords) as peer:
        stream = await peer.open(
            "tokenizer",
            chat("There are two red circles and a blue square. How many circles are there?"),
        )
        frames = await peer.to_end(stream)
        assert frames[0] == ["a", stream]
        assert [frame[2] for frame in frames[1:-1]] == list(range(len(frames) - 2)), (
            "seq counts from 0 without a gap"
        )
        assert "two" in text_of(frames).lower()
        tag, number, seq, status, usage, *_ = frames[-1]
        assert (tag, number, seq, status) == ("e", stream, len(frames) - 2, "stop")
        assert usage["prompt_tokens"] > 0
        assert not peer.errors


async def test_nothing_flows_without_credit(stack: MotetStack) -> None:
    async with Peer.connect(stack.nats_url, stack.passwords) as peer:
        free = await peer.to_end(await peer.open("tokenizer", chat("What can you do?")))
        stream = await peer.open("tokenizer", chat("What can you do?"), credit=2)
        frames = [await peer.next(stream) for _ in range(3)]
        assert [frame[0] for frame in frames] == ["a", "i", "i"]
        with pytest.raises(TimeoutError):
            await peer.next(stream, timeout=1.0)
        await peer.grant(stream, 3)
        frames.append(await peer.next(stream))
        with pytest.raises(TimeoutError):
            await peer.next(stream, timeout=0.5)
        await peer.grant(stream, 10_000)
        frames += await peer.to_end(stream)
        assert frames[-1][0] == "e"
        assert text_of(frames) == text_of(free)
        assert ids_of(frames) == ids_of(free)


async def test_cancel_ends_a_stream(stack: MotetStack) -> None:
    async with Peer.connect(stack.nats_url, stack.passwords) as peer:
        stream = await peer.open("tokenizer", {**chat("Hello!"), "model": ENDLESS}, credit=30_000)
        for _ in range(5):
            await peer.next(stream)
        await peer.cancel(stream)
        async with asyncio.timeout(30):
            while await something_comes(peer, stream):  # what was under way when the cancel arrived
                pass


async def test_refusals_are_typed(stack: MotetStack) -> None:
    async with Peer.connect(stack.nats_url, stack.passwords) as peer:
        unknown = await peer.to_end(
            await peer.open("tokenizer", {**chat("Hello!"), "model": "gpt-99"})
        )
        assert unknown[-1][3] == "model_not_found"
        long = await peer.to_end(await peer.open("tokenizer", chat("red circle " * 5000)))
        assert long[-1][3] == "context_length_exceeded"
        old = await peer.to_end(await peer.open("tokenizer", chat("Hello!"), v=0))
        assert old[-1][3] == "protocol_mismatch"
        empty = await peer.to_end(await peer.open("tokenizer", {"type": "chat"}))
        assert empty[-1][3] == "malformed_message"


async def test_a_stream_can_be_resumed_from_what_was_shown(stack: MotetStack) -> None:
    async with Peer.connect(stack.nats_url, stack.passwords) as peer:
        whole = await peer.to_end(await peer.open("tokenizer", chat("What can you do?")))
        part = whole[: len(whole) // 2]
        resume = {"ids": ids_of(part), "text_len": len(text_of(part))}
        rest = await peer.to_end(
            await peer.open("tokenizer", chat("What can you do?", resume=resume))
        )
        assert text_of(part) + text_of(rest) == text_of(whole)
        assert ids_of(part) + ids_of(rest) == ids_of(whole)


async def test_everybody_beats(speaking: MotetStack) -> None:
    beats = await heartbeats(speaking.nats_url, speaking.passwords, 1.5)
    running = {child["instance"]: child for child in speaking.children() if child["role"] != "nats"}
    assert set(running) <= set(beats)
    announced = {}
    for instance, child in running.items():
        assert beats[instance]["state"] == "ready"
        announced[child["role"]] = {card["name"] for card in beats[instance].get("models", [])}
    assert announced == {
        "gateway": set(),
        "tokenizer": {"pocket-chat"},
        "decode": {"pocket-chat"},
        "encoder": {"pocket-chat"},
        "vad": {"silero-vad", "pocket-turns"},
        "asr": {ASR_MODEL},
        "tts": {VOICE},
    }


async def test_permissions_hold(stack: MotetStack) -> None:
    """A decode worker may not ask the tokenizer for anything, nor read what is sent to others."""
    async with Peer.connect(stack.nats_url, stack.passwords, role="decode") as peer:
        await peer.client.publish("motet.v2.tokenizer.chat", b"x")
        await peer.client.subscribe("motet.v2.inbox.gateway.>", cb=peer._on_frames)
        await peer.client.flush()
        for _ in range(200):  # errors are handed over by a task, which may run after the flush
            if len(peer.errors) == 2:
                break
            await asyncio.sleep(0.02)
        assert len(peer.errors) == 2
        assert all("permissions violation" in str(error).lower() for error in peer.errors)
