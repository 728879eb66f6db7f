"""Answer a chat in text and sound: the graphs of replies that are spoken.

`OMNI`: the model speaks itself. Its thinker writes; its talker goes on from the thinker's states, at
decode, and code2wav makes samples of its codes, both behind one stream to tts. The sound begins with
the second token. `SENTENCES`: another model speaks each sentence as soon as it is complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any, cast

import msgspec

from motet_media.audio import SAMPLE_BYTES
from motet_pipelines.answers import Answers
from motet_pipelines.chat.chat import chat_with_prompt
from motet_pipelines.voice.speak import ClonedVoice, narrate
from motet_shared.errors import StreamBroken
from motet_shared.messages import (
    Audio,
    Chat,
    ModelCard,
    PromptPiece,
    Speak,
    SpeakStates,
    States,
    Text,
)
from motet_shared.wire.discovery import Directory
from motet_shared.wire.instances import pick
from motet_shared.wire.stream import Stream

from .graph import Call, Graph, Items, Stage

THINK, SPEAK = "think", "speak"  # stages
_audio = msgspec.msgpack.Decoder(list[Audio])
_ends = msgspec.msgpack.Decoder(bool)


def think(call: Call, _: Mapping[str, Items]) -> AsyncGenerator[list[Any], None]:
    """Yield text and, if the request wants them, states."""
    request = cast(Chat, call.requests[THINK])
    return chat_with_prompt(
        call.bus,
        request,
        call.outcomes.get(THINK),
        deadline=call.deadline,
        patience=call.patience,
        epoch=call.epoch,
    )


async def speak_states(call: Call, inputs: Mapping[str, Items]) -> AsyncGenerator[list[Any], None]:
    """Yield the speech of a reply from its states.

    If the instance dies, the speech ends there: the states before are gone. Talkers are replaced.
    Behind what an earlier process has recorded it goes on, where the thinker still writes and so
    sends its states again.
    """
    request = cast(SpeakStates, call.requests[SPEAK])
    answers, samples = Answers(request, _audio, _ends), 0
    while (batch := await answers.recorded()) is not None:
        samples += sum(len(item.data) for item in batch) // SAMPLE_BYTES
        yield batch
    if answers.end is not None:
        return
    request = msgspec.structs.replace(request, skip=samples)
    async with answers.live():
        instance = await pick(call.bus, "tts", request.model, patience=call.patience)
        stream = call.bus.open(
            "tts", request, instance=instance, deadline=call.deadline, epoch=call.epoch
        )
        async with stream:
            feeding = asyncio.create_task(_feed(stream, inputs["states"]))
            try:
                async for batch in cast(AsyncIterator[list[Audio]], stream.batches()):
                    await answers.record(batch)
                    yield batch
                if samples and not await feeding:
                    raise StreamBroken("the states of a reply that is written are gone")
            finally:
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)
        await answers.finish(True)


async def _feed(stream: Stream, states: Items) -> bool:
    """Feed states until their end; return True if there were any."""
    any_fed = False
    async for batch in states:
        for item in batch:
            await stream.send(msgspec.msgpack.encode(item))
            any_fed = True
    await stream.end_input()
    return any_fed


def speak_sentences(call: Call, inputs: Mapping[str, Items]) -> AsyncGenerator[list[Any], None]:
    """Yield the speech of a reply from its text, sentence by sentence.

    The outcome of the stage is (`speak.Outcome`, a `ClonedVoice` or None).
    """
    outcome, cloned = cast(tuple[Any, ClonedVoice | None], call.outcomes[SPEAK])

    async def pieces() -> AsyncIterator[str]:
        async for batch in inputs["text"]:
            yield "".join(item.text for item in batch)

    return narrate(
        call.bus,
        cast(Speak, call.requests[SPEAK]),
        pieces(),
        outcome,
        deadline=call.deadline,
        patience=call.patience,
        epoch=call.epoch,
        cloned=cloned,
    )


OMNI = Graph(
    "omni",
    stages=(
        Stage(
            THINK,
            role="tokenizer",
            run=think,
            gives={"prompt": PromptPiece, "text": Text, "states": States},
        ),
        Stage(
            SPEAK,
            role="tts",
            run=speak_states,
            takes=("states",),
            gives={"audio": Audio},
            optional=True,
        ),
    ),
    yields=("prompt", "text", "audio"),
)

SENTENCES = Graph(
    "sentences",
    stages=(
        Stage(THINK, role="tokenizer", run=think, gives={"prompt": PromptPiece, "text": Text}),
        Stage(SPEAK, role="tts", run=speak_sentences, takes=("text",), gives={"audio": Audio}),
    ),
    yields=("prompt", "text", "audio"),
)


def own_voices(directory: Directory, model: str) -> ModelCard | None:
    """Return the card of what speaks the replies of this chat model itself; None if none is ready."""
    beats = directory.ready("tts", model=model, suspects=True)
    cards = (card for beat in beats for card in beat.models if card.name == model)
    return next((card for card in cards if card.answers), None)


def speaks_itself(directory: Directory, model: str) -> bool:
    """Return True if a service that speaks the replies of this chat model is ready."""
    return own_voices(directory, model) is not None
