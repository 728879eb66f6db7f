"""Kill -9 of gateways under WebSocket sessions: clients that know nothing of it are told all that they are to be told.

The clients are those of `websockets`, as they are; each blow falls at a point of the session that the client sees.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import websockets

from chaos.test_gateway_deaths import scale
from chaos.test_voice import SAID, TOKENS, Turn, all_of_it
from e2e import markov
from e2e.stack import MotetStack
from support.checkpoints import tts_checkpoints
from support.checkpoints.asr_checkpoints import tiny_whisper
from support.clients.realtime_client import Client, talking
from support.media.spoken import say, silence

pytestmark = [pytest.mark.long, pytest.mark.timeout(400), pytest.mark.xdist_group("session_deaths")]

MODEL = "markov"
READ_OUT = (
    "Two red circles and a blue square. Where is the small green star? It is behind the door. "
)
MINUTE = 60_000  # ms
FRAME_MS = 32  # in which voice activity is noticed
# Live, what is heard depends on when. Speech comes in small pieces, so that it is struck in its middle.
_EXACT = {
    "MOTET_LIVE": "false",
    "MOTET_FALLBACK": "false",
    "MOTET_FIRST_CHUNK": "0.002",
    "MOTET_CHUNK": "0.01",
}


@pytest.fixture(scope="module")
def kept_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotetStack]:
    folder = tmp_path_factory.mktemp("sessions")
    models = (
        *("--llm", str(markov.save(folder / MODEL, sentences=True))),
        *("--asr", str(tiny_whisper(folder / "ears"))),
        *("--tts", str(tts_checkpoints.pocket_tts(folder / "voice"))),
    )
    with MotetStack(folder, *models, "--no-store", "--keep-connections", env=_EXACT) as stack:
        stack.wait_until_all_ready()
        yield stack


class Watched(Client):
    """A client that measures how long nothing came while a gateway was away."""

    pauses: list[float]
    killed: float | None = None

    async def next(self) -> dict[str, Any]:
        event = await super().next()
        if self.killed is not None:
            self.pauses.append(time.monotonic() - self.killed)
            self.killed = None
        return event

    async def kill(self, stack: MotetStack) -> None:
        """Kill the gateway; its successor adopts this connection before the next blow."""
        restarted = stack.kill("gateway")
        self.killed = time.monotonic()
        self.restarted = asyncio.create_task(asyncio.to_thread(restarted))

    async def until_deltas(self, kind: str, count: int) -> None:
        for _ in range(count):
            await self.until(kind)


@asynccontextmanager
async def talk(stack: MotetStack, **session: Any) -> AsyncIterator[Watched]:
    url = stack.url.replace("http://", "ws://") + f"/v1/realtime?model={MODEL}"
    settings = {"temperature": 0, "max_output_tokens": TOKENS, **session}
    async with talking(url, **settings) as plain:
        client = Watched(plain.socket, plain.events)
        client.pauses = []
        yield client
        if client.killed is not None:
            await client.restarted


async def write_turn(client: Watched, stack: MotetStack, number: int, *, kills: bool) -> None:
    """Write a turn, and wait for its reply. `kills`: the gateway, in the middle of that."""
    content = [{"type": "input_text", "text": f"turn {number} says abc"}]
    item = {"type": "message", "role": "user", "content": content}
    await client.send("conversation.item.create", item=item)
    await client.send("response.create")
    await client.until_deltas("response.output_text.delta", 3)
    if kills:
        await client.kill(stack)
    await client.until("rate_limits.updated")
    if kills:
        await client.restarted


async def written(stack: MotetStack, *, kills: bool) -> tuple[list[Any], list[float]]:
    """Three written turns, and a blow into the middle of each."""
    async with talk(stack, output_modalities=["text"]) as client:
        for number in range(3):
            await write_turn(client, stack, number, kills=kills)
    return what_was_written(client.events), client.pauses


def what_was_written(events: list[dict[str, Any]]) -> list[Any]:
    """Each response: its events, text and use; every event has come once, in one row."""
    numbers = [int(event["event_id"].rpartition("_")[2]) for event in events]
    assert numbers == list(range(1, len(events) + 1))
    told: list[Any] = []
    for done in (event["response"] for event in events if event["type"] == "response.done"):
        own = [event for event in events if event.get("response_id") == done["id"]]
        deltas = [e["delta"] for e in own if e["type"] == "response.output_text.delta"]
        (item,) = done["output"]
        assert "".join(deltas) == item["content"][0]["text"]
        kinds = [event["type"] for event in own if not event["type"].endswith(".delta")]
        told.append((kinds, "".join(deltas), done["status"], done["usage"]["output_tokens"]))
    return told


async def spoken(stack: MotetStack, blows: set[str], before: int = 0) -> tuple[Turn, list[float]]:
    """One spoken turn, answered by speech. `blows`: before it, while it is spoken, heard, answered.

    before: ms of silence before it.
    """
    sound = silence(500) + say(SAID) + silence(900)
    half = len(sound) // 4 * 2
    async with talk(stack, audio={"input": {"transcription": {"language": "en"}}}) as client:
        await client.audio(silence(before))
        if "before" in blows:
            await client.kill(stack)
            await client.restarted
        await client.audio(sound[:half])
        await client.until("input_audio_buffer.speech_started")
        if "spoken" in blows:
            await client.kill(stack)
            await client.restarted
        await client.audio(sound[half:])
        await client.until("input_audio_buffer.committed")
        if "heard" in blows:
            await client.kill(stack)
            await client.restarted
        await client.until_deltas("response.output_audio.delta", 2)
        if "answered" in blows:
            await client.kill(stack)
        await all_of_it(client)
        if "answered" in blows:
            await client.restarted
    return Turn.of(client.events), client.pauses


async def spoken_texts(
    stack: MotetStack, blows: list[int] | None = None
) -> tuple[list[Any], list[float]]:
    """Two texts that are spoken while they are written. `blows`: at the begin of what has these places in the result.

    Returns all messages, in which sounds that follow each other are joined.
    """
    url = stack.url.replace("http://", "ws://") + "/v1/audio/speech/stream"
    told: list[Any] = []
    pauses: list[float] = []
    restarted: list[asyncio.Task[Any]] = []
    async with websockets.connect(url, proxy=None, max_size=None) as socket:

        async def send(kind: str, **fields: Any) -> None:
            await socket.send(json.dumps({"type": kind, **fields}))

        await send("session.config", response_format="pcm", stream_audio=True, seed=5)
        for text in (READ_OUT, READ_OUT[::-1]):
            for at in range(0, len(text), 11):
                await send("input.text", text=text[at : at + 11])
            await send("input.done")
        await send("session.close")
        before, killed = 0.0, False
        async for message in socket:
            if killed:
                pauses.append(time.monotonic() - before)
                killed = False
            if isinstance(message, bytes) and told and isinstance(told[-1], bytes):
                told[-1] += message
                continue
            told.append(json.loads(message) if isinstance(message, str) else message)
            if len(told) - 1 in (blows or ()):
                if restarted:
                    await restarted[-1]
                again = stack.kill("gateway")
                before, killed = time.monotonic(), True
                restarted.append(asyncio.create_task(asyncio.to_thread(again)))
    await asyncio.gather(*restarted)
    assert socket.close_code == 1000
    return told, pauses


async def test_spoken_texts_outlive_their_gateways(
    kept_stack: MotetStack, capsys: pytest.CaptureFixture[str]
) -> None:
    undisturbed, _ = await spoken_texts(kept_stack)
    assert (await spoken_texts(kept_stack))[0] == undisturbed, "the yardstick"
    blows = [place for place, one in enumerate(undisturbed) if isinstance(one, bytes)][:3]
    told, pauses = await spoken_texts(kept_stack, blows)
    assert told == undisturbed
    assert len(pauses) == 3
    report(capsys, "spoken texts", pauses)


def report(capsys: pytest.CaptureFixture[str], what: str, pauses: list[float]) -> None:
    with capsys.disabled():
        print(f"\n{what}: pauses of {', '.join(f'{pause:.2f}' for pause in pauses)} s")


async def test_a_client_that_is_away_finds_its_session_at_the_next_gateway(
    kept_stack: MotetStack, capsys: pytest.CaptureFixture[str]
) -> None:
    """It leaves in the middle of a reply; the gateway dies before it comes back, with the last event that it has."""
    told = []
    for kills in (False, True):
        async with talk(kept_stack, output_modalities=["text"]) as client:
            content = [{"type": "input_text", "text": "turn 0 says abc"}]
            item = {"type": "message", "role": "user", "content": content}
            await client.send("conversation.item.create", item=item)
            await client.send("response.create")
            await client.until_deltas("response.output_text.delta", 3)
            if kills:
                client.socket.transport.abort()
                await asyncio.sleep(0.2)  # the reply goes on
                await client.kill(kept_stack)
                await client.restarted
                await resume(client, kept_stack)
            if "rate_limits.updated" not in {event["type"] for event in client.events}:
                await client.until("rate_limits.updated")
            told.append(what_was_written(client.events))
            if kills:
                await client.socket.close()
                report(capsys, "back after", client.pauses)
    assert told[0] == told[1]


async def come_back(client: Watched, stack: MotetStack) -> None:
    """Leave as by accident, and come back."""
    client.socket.transport.abort()
    await asyncio.sleep(0.2)
    await resume(client, stack)


async def resume(client: Watched, stack: MotetStack) -> None:
    """Come back over a new connection with the last event that came."""
    session_id, after = client.events[0]["session"]["id"], client.events[-1]["event_id"]
    url = stack.url.replace("http://", "ws://") + "/v1/realtime"
    client.socket = await websockets.connect(
        f"{url}?session_id={session_id}&after={after}", proxy=None, max_size=None
    )
    while True:
        client.events.append(json.loads(await client.socket.recv()))
        if client.events[-1]["type"] == "session.resumed":  # ours, not OpenAI's
            return


async def test_a_client_comes_back_to_its_session_by_any_gateway_of_the_host(
    kept_stack: MotetStack,
) -> None:
    """The store gives a new connection to the gateway with the fewest: to the one without the session."""
    undisturbed, _ = await written(kept_stack, kills=False)
    scale(kept_stack, 2)
    try:
        async with talk(kept_stack, output_modalities=["text"]) as client:
            for number in range(3):
                await write_turn(client, kept_stack, number, kills=False)
                for _ in range(2):
                    await come_back(client, kept_stack)
            told = [event["type"] for event in client.events]
            assert told.count("session.resumed") == 6
            await client.socket.close()
        url = kept_stack.url.replace("http://", "ws://") + "/v1/realtime?session_id=sess_unknown"
        async with websockets.connect(url, proxy=None) as socket:
            refusal = json.loads(await socket.recv())
        assert refusal["error"]["code"] == "session_not_found"
        assert refusal["error"]["param"] == "session_id"
    finally:
        scale(kept_stack, 1)
    assert what_was_written(client.events) == undisturbed


async def test_a_written_session_outlives_three_gateways(
    kept_stack: MotetStack, capsys: pytest.CaptureFixture[str]
) -> None:
    undisturbed, _ = await written(kept_stack, kills=False)
    assert (await written(kept_stack, kills=False))[0] == undisturbed, "the yardstick"
    told, pauses = await written(kept_stack, kills=True)
    assert told == undisturbed
    assert len(pauses) == 3
    report(capsys, "written", pauses)


async def test_a_spoken_session_outlives_its_gateways(
    kept_stack: MotetStack, capsys: pytest.CaptureFixture[str]
) -> None:
    undisturbed, _ = await spoken(kept_stack, set())
    assert (await spoken(kept_stack, set()))[0] == undisturbed, "the yardstick"
    assert undisturbed.transcript
    assert len(undisturbed.pcm) > 1_000
    turn, pauses = await spoken(kept_stack, {"heard", "answered"})
    assert turn == undisturbed
    report(capsys, "spoken, heard and answered", pauses)
    # Another stream of voice activity hears in frames that begin elsewhere.
    turn, pauses = await spoken(kept_stack, {"spoken", "heard", "answered"})
    assert turn.start_ms == undisturbed.start_ms
    assert turn.end_ms == pytest.approx(undisturbed.end_ms, abs=2 * FRAME_MS)
    assert (turn.order, turn.text, turn.pcm) == (
        undisturbed.order,
        undisturbed.text,
        undisturbed.pcm,
    )
    report(capsys, "spoken, from its middle", pauses)
    # A minute later: behind three checkpoints, each of which has begun another stream of voice activity.
    turn, pauses = await spoken(kept_stack, {"before", "heard", "answered"}, MINUTE)
    assert turn.start_ms - MINUTE == pytest.approx(undisturbed.start_ms, abs=2 * FRAME_MS)
    assert turn.end_ms - MINUTE == pytest.approx(undisturbed.end_ms, abs=2 * FRAME_MS)
    assert (turn.order, turn.text) == (undisturbed.order, undisturbed.text)
    report(capsys, "spoken, after a minute", pauses)


async def long(stack: MotetStack, *, kills: bool) -> tuple[list[Any], list[float]]:
    """Three written turns behind sounds of more bytes than a gateway has room for. `kills`: in each of them."""
    input_ = {"turn_detection": None}
    async with talk(stack, output_modalities=["text"], audio={"input": input_}) as client:
        sound = base64.b64encode(bytes(900_000 if kills else 900)).decode()
        for number in range(3):
            for _ in range(20):
                await client.send("input_audio_buffer.append", audio=sound)
                await client.send("input_audio_buffer.clear")
            if kills and number == 2:
                await client.kill(stack)
            await client.until_deltas("input_audio_buffer.cleared", 20)
            if kills and number == 2:
                await client.restarted
            await write_turn(client, stack, number, kills=kills)
    return what_was_written(client.events), client.pauses


async def test_a_long_session_outlives_its_gateways(
    kept_stack: MotetStack, capsys: pytest.CaptureFixture[str]
) -> None:
    """72 MB of messages, of which the next gateway handles about one: those behind the last checkpoint."""
    undisturbed, _ = await long(kept_stack, kills=False)
    told, pauses = await long(kept_stack, kills=True)
    assert told == undisturbed
    assert len(pauses) == 4
    report(capsys, "behind 72 MB", pauses)
