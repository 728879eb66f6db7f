"""The state of a session: what another process makes of it has the same state, and goes on alike."""

from __future__ import annotations

import asyncio
import contextlib
import random
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from motet_gateway.http.asgi import ClientGone
from motet_gateway.realtime.audio_settings import AudioSettings, InputTranscription, MuLaw
from motet_gateway.realtime.channel import Channel
from motet_gateway.realtime.event_log import EventLog, LogState
from motet_gateway.realtime.events import RealtimeTool, RetentionRatio
from motet_gateway.realtime.server_events import ServerEvents, ServerEventsState
from motet_gateway.realtime.session_settings import SessionSettings, SettingsState
from motet_gateway.realtime.turn_detection import SemanticVad
from motet_gateway.realtime.video.settings import Merged
from motet_pipelines.voice.audio_buffer import AudioBuffer, AudioState
from motet_pipelines.voice.conversation.events import OutputOpened, ReplyStarted
from motet_pipelines.voice.conversation.frames import Frame, Frames, FramesState
from motet_pipelines.voice.conversation.history import History, HistoryState
from motet_pipelines.voice.conversation.settings import ReplySettings, VideoSettings
from motet_pipelines.voice.conversation.spoken_words import SpokenState, SpokenWords
from motet_pipelines.voice.speak import ClonedVoice
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import PayloadTooLarge
from motet_shared.messages import Audio

Seeds = st.integers(0, 2**32)


def recorded(state: Any, type_: Any) -> Any:
    """The state as another process reads it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=type_)


def history_of(rnd: random.Random, history: History) -> History:
    """Whatever happens to the items of a conversation."""
    for _ in range(rnd.randrange(20)):
        known = [item["id"] for item in history.items()]
        if known and rnd.random() < 0.3:
            history.delete(rnd.choice(known))
        elif known and rnd.random() < 0.3:
            history.keep_turns(rnd.randrange(4))
        else:
            part: dict[str, Any] = {"type": "input_text", "text": str(rnd.random())}
            if rnd.random() < 0.3:
                part = {"type": "input_audio", "transcript": None, "audio": [rnd.randbytes(50)]}
            item = {"id": str(rnd.random()), "type": "message", "role": "user", "content": [part]}
            history.make_room(item)
            with contextlib.suppress(PayloadTooLarge):  # a full one takes what fits
                history.insert(item, rnd.choice([None, "root", *known]))
    return history


@settings(max_examples=50, deadline=None)
@given(Seeds)
def test_items(seed: int) -> None:
    history, again = history_of(random.Random(seed), History(2000)), History(2000)
    again.restore(recorded(history.state(), HistoryState))
    assert again.state() == history.state()
    assert again._bytes == history._bytes
    for one in (history, again):
        history_of(random.Random(seed + 1), one)
    assert again.shown() == history.shown()
    assert again.state() == history.state()


def speak(rnd: random.Random, words: SpokenWords) -> None:
    for _ in range(rnd.randrange(8)):
        if rnd.random() < 0.5:
            words.write(rnd.choice(["one ", "two ", "three. "]))
        elif rnd.random() < 0.8:
            times = [("one", 0, rnd.randrange(90)), ("two", 0, rnd.randrange(90, 200))]
            sound = Audio(bytes(rnd.randrange(5000) * 2), words=times, text=rnd.randrange(9))
            words.note([sound])
        else:
            words.cut(rnd.randrange(100))


@settings(max_examples=50, deadline=None)
@given(Seeds)
def test_spoken_words(seed: int) -> None:
    words = SpokenWords()
    speak(random.Random(seed), words)
    again = SpokenWords(recorded(words.state(), SpokenState))
    assert again.state() == words.state()
    for one in (words, again):
        speak(random.Random(seed + 1), one)
    assert again.state() == words.state()
    assert [again.heard(ms) for ms in range(0, 200, 7)] == [
        words.heard(ms) for ms in range(0, 200, 7)
    ]


VIDEO = (
    VideoSettings(kind="window", frames=3),
    VideoSettings(kind="stride", frames=4),
    VideoSettings(kind="merged", frames=2, groups=3, group_size=2),
    None,
)


@settings(max_examples=80, deadline=None)
@given(Seeds, st.sampled_from(VIDEO), st.integers(0, 40))
def test_frames(seed: int, video: VideoSettings | None, count: int) -> None:
    """Those of every policy, also where their bytes are too many."""
    frames, again = Frames(video, 500), Frames(video, 500)
    rnd = random.Random(seed)
    for _ in range(count if video is not None else 0):
        frames.add(Frame(rnd.randbytes(rnd.randrange(200)), rnd.randrange(9)))
    again.restore(recorded(frames.state(), FramesState))
    assert again.state() == frames.state()
    for number in range(9 if video is not None else 0):
        for one in (frames, again):
            one.add(Frame(b"%d" % number))
    assert again.state() == frames.state()


@settings(max_examples=50, deadline=None)
@given(Seeds)
async def test_audio(seed: int) -> None:
    rnd = random.Random(seed)
    audio = AudioBuffer(24000, rnd.choice([0.0, 1500.0]))
    for _ in range(rnd.randrange(12)):
        await audio.append(rnd.randbytes(rnd.randrange(5000)))
        if rnd.random() < 0.5:
            audio.release(audio.now - rnd.randrange(50))
            audio.forget(audio.now - rnd.randrange(90))
    again = AudioBuffer.restored(recorded(audio.state(), AudioState))
    assert again.state() == audio.state()
    for one in (audio, again):
        await one.append(bytes(777))
    assert again.between(0, 1e9) == audio.between(0, 1e9)
    assert (again.begin, again.now, again.done) == (audio.begin, audio.now, audio.done)


@settings(max_examples=80, deadline=None)
@given(Seeds)
@example(447050)
def test_events(seed: int) -> None:
    """Those that are sent behind the checkpoint are waiting in it, and were sent for the next process."""
    rnd = random.Random(seed)
    log = EventLog(1000)
    number = 0

    def add(count: int) -> list[bytes]:
        nonlocal number
        events = [b'{"event_id":"event_%d"}' % (number + 1 + one) for one in range(count)]
        number += count
        return events

    for _ in range(rnd.randrange(9)):
        log.add(add(rnd.randrange(9)))
        if rnd.random() < 0.7:
            log.take()
    state = recorded(log.state(), LogState)
    sent, again = log.count, EventLog(1000, log.count)
    again.resume(state)
    assert again.state() == log.state()
    behind = EventLog(1000, number)
    behind.resume(state)
    whole, kept = log.state(), behind.state()
    dropped = kept.first - whole.first  # of all that was sent, what is beyond the limit
    assert kept.events == whole.events[dropped:]
    assert dropped == 0 or sum(map(len, whole.events[dropped - 1 :])) > 1000
    if number > max(sent, 1):
        log.take()
        after = f"event_{sent or 1}"
        for one in (log, again, behind):
            one.rewind(after)
        assert again.take() == log.take() == behind.take() != []


def test_settings() -> None:
    audio = AudioSettings(
        input_format=MuLaw(),
        transcription=InputTranscription(model="m", language="en"),
        turn_detection=SemanticVad(eagerness="high"),
        voice="voice_1",
        cloned=ClonedVoice(BlobStore("here"), b"pcm", "words"),
    )
    given_ = SessionSettings(
        "model",
        instructions="brief",
        tools=(RealtimeTool("function", "look", None, {"type": "object"}),),
        truncation=RetentionRatio(0.5),
        include=("item.input_audio_transcription.logprobs",),
        speaks=True,
        audio=audio,
        video=Merged(),
        target="there",
    )
    state = recorded(SettingsState.of(given_), SettingsState)
    store = BlobStore("here")
    again = state.restored(store)
    assert SettingsState.of(again) == state == SettingsState.of(given_)
    assert again.audio.cloned == ClonedVoice(store, b"pcm", "words")
    assert again.as_session("id") == given_.as_session("id")


@pytest.mark.parametrize("settings", [SessionSettings("m"), SessionSettings("", kind="transcription")])  # fmt: skip
def test_plain_settings(settings: SessionSettings) -> None:
    assert recorded(SettingsState.of(settings), SettingsState).settings == settings


@pytest.mark.parametrize(("in_conversation", "count"), [(True, 3), (False, 1)])
def test_spoken_items(in_conversation: bool, count: int) -> None:
    """Those outside of the conversation, which no client deletes, do not add up."""
    rendering = ServerEvents(Channel(Mock(), 100, 0.2), Mock(), dict)
    settings = ReplySettings(model="m", label=SessionSettings("m"))
    assert not rendering.has_spoken
    for number in range(3):
        reply_id = f"resp_{number}"
        rendering.render(ReplyStarted(reply_id, settings, in_conversation, None))
        rendering.render(OutputOpened(reply_id, 0, "speech", {"id": f"item_{number}"}, None))
    assert rendering.has_spoken
    assert len(recorded(rendering.state(), ServerEventsState).spoken) == count


async def test_events_beyond_the_memory_wait_for_a_client_as_long_as_it_may_come_back() -> None:
    socket: Any = Mock()
    channel = Channel(socket, 100, 0.2)
    channel.detach(socket)
    channel.add([b"x" * 200])
    with pytest.raises(ClientGone):
        await channel.flush()
    waits = asyncio.create_task(channel.flush())
    await asyncio.sleep(0.05)
    socket.write = AsyncMock(side_effect=lambda take: take())
    channel.attach(socket)
    await waits
    assert not channel.is_waiting
