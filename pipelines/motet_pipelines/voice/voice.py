"""Voice: listen → think → speak.

A turn of a spoken conversation is three pipelines in a row:

    async for event in turns(bus, audio, policy, caption, replying):    # until the turn ends
        if isinstance(event, Ended):
            text = await event.turn.captions.settled()      # live; without captions: `transcribe_turn`
    messages.append({"role": "user", "content": text})
    async for batch in reply(bus, chat, speak):             # sentences are spoken while written
        ...

Each pipeline fails over when its service dies, and leaving any of them early is a remote cancel: a
caller that interrupts a reply closes the generator, which ends the writing, the speaking and the
requests in progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import TypeVar

from motet_media.audio import wav_header
from motet_pipelines.chat.chat import Outcome, chat
from motet_shared.blobs.store import BlobStore
from motet_shared.messages import Audio, Chat, Speak, Text, Transcribe
from motet_shared.wire.bus import Bus
from motet_shared.wire.epochs import NO_EPOCH, Epoch

from . import speak
from .transcribe import TranscriptionOutcome, transcribe

T = TypeVar("T")
TokenScores = list[tuple[str, float]]  # (text, log-probability) of tokens


async def transcribe_turn(
    bus: Bus,
    store: BlobStore,
    pcm: bytes,
    rate: int,
    request: Transcribe,
    outcome: TranscriptionOutcome | None = None,
    *,
    on_text: Callable[[str, TokenScores], object] = lambda text, scores: None,
    deadline: float | None = None,
    patience: float = 5.0,
) -> str:
    """Return the transcript of a turn. `on_text` gets each piece of it as soon as it is final.

    Its second argument has the tokens of the piece, if `request.logprobs` is set.
    """
    text = ""
    wav = wav_header(rate, len(pcm)) + pcm
    segments = transcribe(bus, store, wav, request, outcome, deadline=deadline, patience=patience)
    async with aclosing(segments):
        async for segment in segments:
            piece = segment.text if text else segment.text.lstrip()
            text += piece
            if piece:
                on_text(piece, segment.logprobs)
    return text.strip()


async def reply(
    bus: Bus,
    chat_request: Chat,
    speak_request: Speak,
    chat_outcome: Outcome | None = None,
    speech_outcome: speak.Outcome | None = None,
    *,
    deadline: float | None = None,
    patience: float = 5.0,
    epoch: Epoch = NO_EPOCH,
    cloned: speak.ClonedVoice | None = None,
) -> AsyncGenerator[list[Text] | list[Audio], None]:
    """Yield text and audio, each as soon as it is there. `say.text` is not used.

    `cloned`: a recording whose voice is used instead of that of `speak_request`. `deadline`: seconds
    for the whole text, and for each sentence that is spoken.
    """
    sentences: asyncio.Queue[str | None] = asyncio.Queue()

    async def write() -> AsyncGenerator[list[Text], None]:
        texts = chat(
            bus, chat_request, chat_outcome, deadline=deadline, patience=patience, epoch=epoch
        )
        async with aclosing(texts):
            async for batch in texts:
                sentences.put_nowait("".join(item.text for item in batch))
                yield batch
        sentences.put_nowait(None)

    async def written() -> AsyncGenerator[str, None]:
        while (piece := await sentences.get()) is not None:
            yield piece

    voice = speak.narrate(
        bus,
        speak_request,
        written(),
        speech_outcome,
        deadline=deadline,
        patience=patience,
        epoch=epoch,
        cloned=cloned,
    )
    both: AsyncGenerator[list[Text] | list[Audio], None] = merged(write(), voice)
    async with aclosing(both):
        async for batch in both:
            yield batch


async def merged(*sources: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """Yield the items of all sources as they come. The first error of any ends them all."""
    waiting: dict[asyncio.Future[T], AsyncGenerator[T, None]] = {}
    for source in sources:
        waiting[asyncio.ensure_future(anext(source))] = source
    done: set[asyncio.Future[T]] = set()
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                source = waiting.pop(task)
                try:
                    item = task.result()
                except StopAsyncIteration:
                    continue
                waiting[asyncio.ensure_future(anext(source))] = source
                yield item
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, *done, return_exceptions=True)
        for source in sources:
            await source.aclose()
