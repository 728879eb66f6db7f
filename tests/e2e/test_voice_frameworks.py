"""Spoken conversations through the OpenAI-realtime clients that voice frameworks bring, as they are installed.

LiveKit Agents: a microphone and a loudspeaker of the test's own in place of a room. It sends and plays in real time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from livekit import rtc
from livekit.agents import Agent, AgentSession, function_tool
from livekit.agents.voice import io
from livekit.plugins.openai import realtime

from e2e.voice_stack import VoiceStack, voice_stack
from motet_media.audio import pcm_bytes
from motet_shared.messages import Text, ToolCallDelta
from support.clients.realtime_client import SPOKEN_TURN, kinds
from support.media.spoken import say, silence
from support.services.fake_services import MODEL, words
from support.services.voice_services import WORD_MS

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(300)]
RATE = 24_000
FRAME_MS = 20
PATIENCE = 60.0  # seconds for anything to happen
STORY = "Once upon a time there was a king who had no shoes. " * 15
INSTRUCTIONS = "Be kind."


class Microphone(io.AudioInput):
    """What it hears, in real time, and silence when there is nothing."""

    def __init__(self) -> None:
        super().__init__(label="microphone")
        self._sound = bytearray()
        self._at: float | None = None

    def hear(self, pcm: bytes) -> None:
        self._sound += pcm

    async def __anext__(self) -> rtc.AudioFrame:
        self._at = (time.monotonic() if self._at is None else self._at) + FRAME_MS / 1000
        await asyncio.sleep(max(0.0, self._at - time.monotonic()))
        size = pcm_bytes(FRAME_MS, RATE)
        piece = bytes(self._sound[:size]).ljust(size, b"\0")
        del self._sound[:size]
        return rtc.AudioFrame(piece, RATE, 1, size // 2)


class Loudspeaker(io.AudioOutput):
    """Plays in real time, and says how far it came when it is told to be silent."""

    def __init__(self) -> None:
        super().__init__(
            label="loudspeaker",
            capabilities=io.AudioOutputCapabilities(pause=False),
            sample_rate=RATE,
        )
        self.played: list[
            tuple[float, bool]
        ] = []  # seconds of each reply, and whether it was interrupted
        self._since: float | None = None
        self._seconds = 0.0
        self._end: asyncio.Task[None] | None = None

    @property
    def position(self) -> float:
        """Seconds into the reply that is being played."""
        return 0.0 if self._since is None else min(self._seconds, time.monotonic() - self._since)

    async def capture_frame(self, frame: rtc.AudioFrame) -> None:
        await super().capture_frame(frame)
        if self._since is None:
            self._since = time.monotonic()
            self.on_playback_started(created_at=time.time())
        self._seconds += frame.duration

    def flush(self) -> None:
        super().flush()
        if self._since is not None:
            self._end = asyncio.create_task(self._play_out())

    async def _play_out(self) -> None:
        await asyncio.sleep(max(0.0, self._seconds - self.position))
        self._finish(self._seconds, interrupted=False)

    def clear_buffer(self) -> None:
        if self._since is not None:
            if self._end is not None:
                self._end.cancel()
            self._finish(self.position, interrupted=True)

    def _finish(self, seconds: float, *, interrupted: bool) -> None:
        self._since, self._seconds = None, 0.0
        self.played.append((seconds, interrupted))
        self.on_playback_finished(playback_position=seconds, interrupted=interrupted)


class Conversation:
    """An agent session with a machine's microphone and loudspeaker, and all that it tells."""

    def __init__(
        self, session: AgentSession, agent: Agent, microphone: Microphone, loudspeaker: Loudspeaker
    ) -> None:
        self.session, self.agent = session, agent
        self.microphone, self.loudspeaker = microphone, loudspeaker
        self.heard: list[str] = []  # final transcripts of the user
        self.errors: list[Any] = []
        self.events: list[dict[str, Any]] = []  # of the server, as they came
        session.on(
            "user_input_transcribed",
            lambda event: self.heard.append(event.transcript) if event.is_final else 0,
        )
        session.on("error", lambda event: self.errors.append(event.error))

    async def say(self, text: str) -> None:
        self.microphone.hear(say(text) + silence(700))

    def statuses(self) -> list[str]:
        return [
            event["response"]["status"] for event in self.events if event["type"] == "response.done"
        ]

    def replies(self) -> list[tuple[str, bool]]:
        """What the framework believes to have said, and whether it was interrupted."""
        items = [
            item
            for item in self.session.history.items
            if item.type == "message" and item.role == "assistant"
        ]
        return [(item.text_content or "", item.interrupted) for item in items]

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        give_up = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < give_up, (
                f"{what}: not within {PATIENCE} s; {kinds(self.events)[-12:]}"
            )
            assert not self.errors, self.errors
            await asyncio.sleep(0.02)


@pytest.fixture
async def stack() -> AsyncIterator[VoiceStack]:
    async with voice_stack() as made:
        yield made


@asynccontextmanager
async def conversation(stack: VoiceStack, *tools: Any) -> AsyncIterator[Conversation]:
    model = realtime.RealtimeModel(
        base_url=f"ws://127.0.0.1:{stack.port}/v1", model=MODEL, api_key="none"
    )
    # By default it sends silence in the first seconds of its own speech: too little of an interruption would be heard.
    session: Any = AgentSession(llm=model, aec_warmup_duration=None)
    microphone, loudspeaker = Microphone(), Loudspeaker()
    session.input.audio, session.output.audio = microphone, loudspeaker
    agent = Agent(instructions=INSTRUCTIONS, tools=list(tools))
    made = Conversation(session, agent, microphone, loudspeaker)
    await session.start(agent=agent)
    agent.realtime_llm_session.on("openai_server_event_received", made.events.append)
    try:
        yield made
        assert not made.errors
    finally:
        await session.aclose()
        await model.aclose()


def answering(
    replies: dict[str, str], otherwise: str = "Very well."
) -> Callable[[Any], list[Text]]:
    """A model that knows what to say to the last message."""
    return lambda request: words(replies.get(request.messages[-1]["content"], otherwise))


ANSWERED_TURN = [
    *SPOKEN_TURN,
    "response.created",
    "response.output_item.added",
    "conversation.item.added",
    "response.content_part.added",
    "response.output_audio.delta",
    "response.output_audio_transcript.delta",
]


@pytest.mark.parametrize(
    "pace", [pytest.param(0.15, id="while it is made"), pytest.param(0.0, id="while it plays")]
)
async def test_livekit_talks_and_interrupts(stack: VoiceStack, pace: float) -> None:
    """The reply stops, the conversation keeps what was heard of it, and goes on."""
    stack.asr.script = ["tell me a story", "stop"]
    stack.tokenizer.reply = answering({"tell me a story": STORY})
    stack.tts.pace = pace
    async with conversation(stack) as talk:
        await talk.say("Two red circles and a blue square.")
        await talk.until(lambda: talk.loudspeaker.position > 1.5, "the story is heard")
        if not pace:
            await talk.until(talk.statuses, "the story is made")
        await talk.say("Two red circles and a blue square.")
        await talk.until(
            lambda: len(talk.loudspeaker.played) == 2 and len(talk.replies()) == 2,
            "the second reply",
        )
    assert talk.heard == ["tell me a story", "stop"]
    seen = kinds(talk.events, heard=False)
    start = seen.index(ANSWERED_TURN[0])
    assert seen[start : start + len(ANSWERED_TURN)] == ANSWERED_TURN
    (until, interrupted), (seconds, again) = talk.loudspeaker.played
    assert (interrupted, again) == (True, False)
    assert seconds * 1000 == pytest.approx(2 * WORD_MS, abs=FRAME_MS)
    assert talk.statuses() == ["cancelled" if pace else "completed", "completed"]
    kept = " ".join(STORY.split()[: int(until * 1000) // WORD_MS])
    assert [message["content"] for message in stack.tokenizer.requests[-1].messages] == [
        INSTRUCTIONS, "tell me a story", kept, "stop",
    ]  # fmt: skip
    (told, cut), (last, _) = talk.replies()
    assert cut
    assert STORY.startswith(told.strip())
    assert last == "Very well."


async def test_livekit_calls_a_function(stack: VoiceStack) -> None:
    """Spoken question, call, result, spoken answer."""
    places: list[str] = []

    @function_tool
    async def weather(place: str) -> str:
        """What the weather is like.

        Args:
            place: a town
        """
        places.append(place)
        return "sunny"

    def reply(request: Any) -> list[Text]:
        if request.messages[-1]["role"] == "tool":
            return words(f"It is {request.messages[-1]['content']}.")
        return [Text("", [1], tools=[ToolCallDelta(0, "call_1", "weather", '{"place": "Paris"}')])]

    stack.asr.script = ["how is the weather in Paris"]
    stack.tokenizer.reply = reply
    async with conversation(stack, weather) as talk:
        await talk.say("Two red circles and a blue square.")
        await talk.until(lambda: talk.loudspeaker.played and talk.replies(), "the answer")
    assert places == ["Paris"]
    assert talk.replies() == [("It is sunny.", False)]
    tools = stack.tokenizer.requests[0].tools
    assert [tool["function"]["name"] for tool in tools] == ["weather"]
