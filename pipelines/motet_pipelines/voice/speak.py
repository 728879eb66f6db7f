"""Speak: text in, PCM out while it is synthesized, with failover between instances.

    async with aclosing(speak(bus, Speak(model="pocket-tts", text="Hello there."))) as batches:
        async for batch in batches:  # list[Audio]: all that has arrived
            play(b"".join(item.data for item in batch))

If the instance dies, the stream continues at another one from the last whole sentence: its samples
are synthesized again (the noise depends on seed, sentence and frame alone) and those already
received are left out, so no word is lost or repeated. Leaving a generator early is a remote cancel;
`aclosing` makes that prompt.

`narrate` speaks a text that is still being written: each sentence as soon as it is complete, the
first clause sooner. `sentences` and `speak_sentence` are its two halves, for callers that need to
know where a sentence begins.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import msgspec

from motet_media.audio import SAMPLE_BYTES
from motet_pipelines.answers import Answers
from motet_shared.blobs.store import BlobStore
from motet_shared.messages import Audio, Speak, SpeechResume, Usage, VoiceSample
from motet_shared.text.sentences import Chunk, Cutter
from motet_shared.wire.bus import Bus
from motet_shared.wire.epochs import NO_EPOCH, Epoch
from motet_shared.wire.failover import Failover, StreamMoves

from .playout import Playout
from .sound_files import lent

RATE = 24_000  # Hz of the PCM


_batches = msgspec.msgpack.Decoder(list[Audio])
_ends = msgspec.msgpack.Decoder(bool)


@dataclass(slots=True, kw_only=True)
class Outcome(StreamMoves):
    """Totals of a speech; complete once the generator has ended."""

    samples: int = 0
    # Of all whole sentences: prompt tokens are those of their text, completion tokens are frames.
    usage: Usage = field(default_factory=Usage)
    playout: Playout = field(default_factory=lambda: Playout(RATE * SAMPLE_BYTES))


@dataclass(frozen=True, slots=True)
class ClonedVoice:
    """Hold a recording whose voice is used.

    store: lends it to the instance that speaks.
    pcm: mono, 16 bits, at `RATE`.
    words: what is said in it.
    """

    store: BlobStore
    pcm: bytes
    words: str


@dataclass(slots=True)
class _Position:
    """Position of the caller: the end of the last whole sentence, and samples of the next one."""

    text: int = 0
    samples: int = 0
    skip: int = 0

    def note(self, batch: Iterable[Audio], outcome: Outcome) -> None:
        """Add a batch to the position and to the outcome."""
        for item in batch:
            count = len(item.data) // SAMPLE_BYTES
            outcome.samples += count
            self.skip += count
            if item.text > self.text:
                self.text, self.samples, self.skip = item.text, self.samples + self.skip, 0
            if item.usage is not None:
                outcome.usage.prompt_tokens += item.usage.prompt_tokens
                outcome.usage.completion_tokens += item.usage.completion_tokens

    def resume(self) -> SpeechResume:
        return SpeechResume(self.text, self.samples, self.skip)


async def speak(
    bus: Bus,
    request: Speak,
    outcome: Outcome | None = None,
    *,
    deadline: float | None = None,
    patience: float = 5.0,
    epoch: Epoch = NO_EPOCH,
    cloned: ClonedVoice | None = None,
) -> AsyncGenerator[list[Audio], None]:
    """Yield the speech in batches of whatever has arrived.

    `cloned`: a recording whose voice is used instead of `request.voice`. `deadline`: seconds for
    everything. `patience`: seconds without progress, in which an instance may appear or restart,
    before the last retryable error is raised. Other errors are raised at once, Overloaded too
    unless audio was sent.
    """
    outcome = outcome or Outcome()
    outcome.playout.begin(bus.clock.now())
    position, samples = _Position(), outcome.samples
    moves = Failover(
        bus,
        "tts",
        request.model,
        outcome,
        lambda: outcome.samples,
        patience=patience,
        deadline=deadline,
        what="speech",
    )
    answers = Answers(request, _batches, _ends)
    while (batch := await answers.recorded()) is not None:
        position.note(batch, outcome)
        yield batch
    if answers.end is not None:
        return
    if outcome.samples > samples:
        request = msgspec.structs.replace(request, resume=position.resume())
    epoch = answers.epoch(epoch)
    async with answers.live():
        while True:
            async with moves as instance, _with_sample(request, cloned, instance) as asked:
                stream = bus.open(
                    "tts", asked, instance=instance, deadline=moves.left(), epoch=epoch
                )
                async with stream:
                    async for batch in cast(AsyncIterator[list[Audio]], stream.batches()):
                        await answers.record(batch)
                        position.note(batch, outcome)
                        data = sum(len(item.data) for item in batch)
                        outcome.playout.receive(data, bus.clock.now())
                        yield batch
                        outcome.playout.resume(bus.clock.now())
                    await answers.finish(True)
                    outcome.playout.end(bus.clock.now())
                    return
            request = msgspec.structs.replace(request, resume=position.resume())


@asynccontextmanager
async def _with_sample(
    request: Speak, cloned: ClonedVoice | None, instance: str
) -> AsyncIterator[Speak]:
    """Yield the request with the recording, which is lent to `instance` meanwhile."""
    if cloned is None:
        yield request
        return
    async with lent(cloned.store, cloned.pcm, instance) as ref:
        yield msgspec.structs.replace(request, sample=VoiceSample(ref, cloned.words))


async def narrate(
    bus: Bus,
    request: Speak,
    pieces: AsyncIterator[str],
    outcome: Outcome | None = None,
    *,
    deadline: float | None = None,
    patience: float = 5.0,
    epoch: Epoch = NO_EPOCH,
    cloned: ClonedVoice | None = None,
) -> AsyncGenerator[list[Audio], None]:
    """Speak `pieces` while they come; `request.text` is not used.

    The audio equals `speak` of all of it.

    Items count over the whole text: their sentences, the times of their words, and their positions
    in the text. `deadline`: seconds for each sentence.
    """
    outcome = outcome or Outcome()
    async for number, chunk in sentences(pieces):
        spoken = speak_sentence(
            bus,
            request,
            number,
            chunk,
            outcome,
            deadline=deadline,
            patience=patience,
            epoch=epoch,
            cloned=cloned,
        )
        async with aclosing(spoken) as batches:
            async for batch in batches:
                yield batch


async def sentences(pieces: AsyncIterator[str]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """Yield the number and text of each sentence of a text that comes in pieces.

    A sentence is yielded as soon as it is complete, the first clause of the text sooner.
    """
    cutter, number = Cutter(), 0
    async for piece in pieces:
        for chunk in cutter.push(piece):
            yield number, chunk
            number += 1
    for chunk in cutter.flush():
        yield number, chunk
        number += 1


async def speak_sentence(
    bus: Bus,
    request: Speak,
    number: int,
    chunk: Chunk,
    outcome: Outcome,
    *,
    deadline: float | None = None,
    patience: float = 5.0,
    epoch: Epoch = NO_EPOCH,
    cloned: ClonedVoice | None = None,
) -> AsyncGenerator[list[Audio], None]:
    """Speak one of `sentences`; `outcome` has the totals of those before it.

    The items' times and positions are of the whole text. `request.text` is not used; `deadline`:
    seconds for this sentence.
    """
    part = msgspec.structs.replace(request, text=chunk.text, sentence=number)
    base = round(outcome.samples / RATE * 1000)
    spoken = speak(
        bus, part, outcome, deadline=deadline, patience=patience, epoch=epoch, cloned=cloned
    )
    async with aclosing(spoken) as batches:
        async for batch in batches:
            for item in batch:
                item.words = [(word, start + base, end + base) for word, start, end in item.words]
                item.text = chunk.end if item.text else 0
            yield batch
