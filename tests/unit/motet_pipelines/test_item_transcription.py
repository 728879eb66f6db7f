"""Words of items: what is kept of a transcription that failed, and what waits for it."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from motet_pipelines.voice.conversation.events import Event, Failed
from motet_pipelines.voice.conversation.floor import Floor
from motet_pipelines.voice.conversation.frames import Frames
from motet_pipelines.voice.conversation.history import History, Item
from motet_pipelines.voice.conversation.inputs import CreateReply
from motet_pipelines.voice.conversation.item_transcription import ItemTranscription, PartAudio
from motet_pipelines.voice.conversation.replies import Replies
from motet_pipelines.voice.conversation.settings import ConversationLimits, ReplySettings
from motet_pipelines.voice.voice import TokenScores
from motet_shared.errors import BadRequest, Unavailable
from motet_shared.testing import settle

NOTHING: Any = None
RATE = 24_000


class Sink:
    """Keep the events."""

    is_free = True

    def __init__(self) -> None:
        self.events: list[Event] = []

    def post(self, *events: Event) -> None:
        self.events += events

    async def emit(self, *events: Event) -> None:
        self.events += events


class Transcription(ItemTranscription):
    """Transcribe an item as its future says."""

    def __init__(self) -> None:
        self.sink, self.history = Sink(), History(1 << 20)
        super().__init__(NOTHING, NOTHING, NOTHING, ConversationLimits(), self.history, self.sink)
        self.answers: dict[str, asyncio.Future[str]] = {}

    async def say(self, item_id: str) -> Item:
        self.answers[item_id] = asyncio.get_running_loop().create_future()
        item = await self.commit(item_id, PartAudio(bytes(4800), RATE, None))
        await settle()
        return item

    async def _transcribe_audio(
        self, item_id: str, audio: PartAudio, on_text: Callable[[str, TokenScores], object]
    ) -> str:
        return await self.answers[item_id]


class Sound(PartAudio):
    """Audio that can be referenced weakly."""


async def test_a_failed_transcription_keeps_its_error_and_no_audio() -> None:
    transcription = Transcription()
    transcription.answers["a"] = asyncio.get_running_loop().create_future()
    audio = Sound(bytes(4800), RATE, None)
    alive = weakref.ref(audio)
    item = await transcription.commit("a", audio)
    del audio
    await settle()
    transcription.answers.pop("a").set_exception(BadRequest("nothing to hear"))
    await settle()
    gc.collect()
    assert alive() is None
    (error,) = transcription.state().values()
    assert (error.code, error.message) == ("invalid_request", "nothing to hear")
    transcription.forget_errors(item)
    assert transcription.state() == {}


async def test_all_words_are_waited_for_before_the_first_error_is_raised() -> None:
    transcription = Transcription()
    items = [await transcription.say(item_id) for item_id in "abc"]
    waiting = asyncio.create_task(transcription.wait(items))
    transcription.answers["a"].set_exception(BadRequest("the first"))
    transcription.answers["b"].set_exception(Unavailable("the second"))
    await settle()
    assert not waiting.done()
    transcription.answers["c"].set_result("hello")
    with pytest.raises(BadRequest):
        await waiting
    assert items[2]["content"][0]["transcript"] == "hello"
    await transcription.wait(items)  # errors are raised only once


async def test_an_error_is_raised_after_a_wait_that_was_cancelled() -> None:
    transcription = Transcription()
    items = [await transcription.say(item_id) for item_id in "ab"]
    waiting = asyncio.create_task(transcription.wait(items))
    transcription.answers["a"].set_exception(BadRequest("nothing to hear"))
    await settle()
    waiting.cancel()
    await settle()
    transcription.answers["b"].set_result("hello")
    with pytest.raises(BadRequest):
        await transcription.wait(items)


class Answering(Replies):
    """Count the replies that would begin."""

    begun = 0

    def create(self, request: CreateReply) -> None:
        self.begun += 1


@pytest.mark.parametrize(("words", "begun"), [("hello", 1), ("", 0)])
async def test_a_turn_is_answered_though_the_words_of_the_one_before_are_lost(
    words: str, begun: int
) -> None:
    transcription = Transcription()
    sink, frames = transcription.sink, Frames(None, 0)
    settings = ReplySettings(model="m")
    replies = Answering(
        NOTHING, settings, Floor(), transcription.history, frames, transcription, sink
    )
    for item_id in "ab":
        replies.answer(await transcription.say(item_id))
    transcription.answers["a"].set_exception(BadRequest("nothing to hear"))
    transcription.answers["b"].set_result(words)
    await replies.finish()
    (failed,) = [event for event in sink.events if isinstance(event, Failed)]
    assert isinstance(failed.error, BadRequest)
    assert replies.begun == begun
