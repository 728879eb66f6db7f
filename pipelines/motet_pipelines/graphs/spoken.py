"""Answer a chat in text and sound: the graphs of replies that are spoken.

`OMNI`: the model speaks itself. Its thinker writes; its talker goes on from the thinker's states, at
decode, and code2wav makes samples of its codes, both behind one stream to tts. The sound begins with
the second token. `SENTENCES`: another model speaks each sentence as soon as it is complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any, cast

import msgspec

from motet_media.audio import SAMPLE_BYTES
from motet_pipelines.answers import Answers, record_in
from motet_pipelines.chat.chat import Outcome, chat_with_prompt, received_length
from motet_pipelines.voice.speak import ClonedVoice, narrate
from motet_shared.errors import StreamBroken
from motet_shared.messages import (
    Audio,
    Chat,
    ModelCard,
    PromptPiece,
    Resume,
    Speak,
    SpeakStates,
    States,
    Text,
)
from motet_shared.wire.discovery import Directory
from motet_shared.wire.epochs import Epoch
from motet_shared.wire.failover import Failover, StreamMoves
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

    If the instance dies, another one speaks the reply again from behind the samples that were
    received, and so does the first behind those that an earlier process has recorded. The states are
    read once; then the thinker computes them again.
    """
    request = cast(SpeakStates, call.requests[SPEAK])
    answers, samples = Answers(request, _audio, _ends), 0
    while (batch := await answers.recorded()) is not None:
        samples += _samples(batch)
        yield batch
    if answers.end is not None:
        return
    epoch = answers.epoch(call.epoch)
    reply = _Reply(call, inputs, epoch)
    moves = Failover(
        call.bus,
        "tts",
        request.model,
        StreamMoves(),
        lambda: samples,
        patience=call.patience,
        deadline=call.deadline,
        what="speech",
    )
    async with answers.live(), reply.followed():
        while True:
            async with moves as instance:
                behind = msgspec.structs.replace(request, skip=samples)
                stream = call.bus.open(
                    "tts", behind, instance=instance, deadline=moves.left(), epoch=epoch
                )
                async with stream, aclosing(_fed(stream, reply.feed(stream))) as fed:
                    async for batch in fed:
                        await answers.record(batch)
                        samples += _samples(batch)
                        yield batch
                await answers.finish(True)
                return


def _samples(batch: list[Audio]) -> int:
    return sum(len(item.data) for item in batch) // SAMPLE_BYTES


class _Reply:
    """Follow what a thinker gives: states, which are read once, and the text, from which it goes on.

    epoch: of what this process asks the services; older work of the same request is over.
    """

    def __init__(self, call: Call, inputs: Mapping[str, Items], epoch: Epoch):
        self._call, self._epoch = call, epoch
        self._states, self._texts = inputs["states"], inputs["text"]
        self._received: list[tuple[list[int], int]] = []  # ids and characters of each batch of text
        self._is_read = False

    @asynccontextmanager
    async def followed(self) -> AsyncIterator[None]:
        """Note the text while in the block."""
        following = asyncio.create_task(self._follow())
        try:
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _follow(self) -> None:
        async for batch in self._texts:
            ids = [token for item in batch for token in item.ids]
            self._received.append((ids, sum(map(received_length, batch))))

    async def feed(self, stream: Stream) -> None:
        """Feed a stream all states, until their end.

        Raises StreamBroken if the thinker does not give them again where they were read before.
        """
        thinker = cast(Outcome | None, self._call.outcomes.get(THINK))
        is_first, self._is_read = not self._is_read, True
        fed = is_first and await _feed(stream, self._states)
        if not fed and (not is_first or (thinker is not None and thinker.is_recorded)):
            record_in(None)  # what is computed again has no effect of its own
            async with aclosing(self._again()) as states:
                if not await _feed(stream, states):
                    raise StreamBroken("states: the thinker sends none of this reply again")
        await stream.end_input()

    async def _again(self) -> AsyncGenerator[list[Any], None]:
        """Yield the states again, from the first: the thinker goes on behind the text but its end."""
        call, ids, length = self._call, list[int](), 0
        for received, characters in self._received[:-1]:
            ids += received
            length += characters
        request = cast(Chat, call.requests[THINK])
        if ids:
            request = msgspec.structs.replace(request, resume=Resume(ids, length))
        batches = chat_with_prompt(
            call.bus, request, deadline=call.deadline, patience=call.patience, epoch=self._epoch
        )
        async with aclosing(batches):
            async for batch in batches:
                if states := [item for item in batch if isinstance(item, States)]:
                    yield states


async def _fed(
    stream: Stream, feed: Coroutine[Any, Any, None]
) -> AsyncGenerator[list[Audio], None]:
    """Yield the batches of a stream while it is fed. Raises the first error of either.

    A stream that has ended by itself needs nothing more, and what is fed to it fails.
    """
    batches = cast(AsyncIterator[list[Audio]], stream.batches())
    feeding = asyncio.create_task(feed)
    reading: asyncio.Future[list[Audio] | None] | None = None
    try:
        while True:
            reading = asyncio.ensure_future(anext(batches, None))
            await asyncio.wait((feeding, reading), return_when=asyncio.FIRST_COMPLETED)
            if feeding.done() and stream.end is None:
                feeding.result()
            if (batch := await reading) is None:
                return
            yield batch
    finally:
        tasks: list[asyncio.Future[Any]] = [feeding] if reading is None else [feeding, reading]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # An error of theirs holds this frame, which would hold them.
        del feeding, reading, tasks, task


async def _feed(stream: Stream, states: Items) -> bool:
    """Feed states; return True if there were any."""
    any_fed = False
    async for batch in states:
        for item in batch:
            await stream.send(msgspec.msgpack.encode(item))
            any_fed = True
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
            takes=("text", "states"),
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
