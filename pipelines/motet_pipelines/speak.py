"""Speak: text in, PCM out while it is made, on whichever instance is alive.

    async with aclosing(speak(bus, Speak(model="pocket-tts", text="Hello there."))) as batches:
        async for batch in batches:  # list[Audio]: all that has arrived
            play(b"".join(item.data for item in batch))

If the instance dies, the stream goes on at another one from the last whole sentence: its samples are made again (the
noise depends on seed, sentence and frame alone) and those that were received are left out, so no word is lost or
repeated. Leaving a generator early is a remote cancel; `aclosing` makes that prompt.

`narrate` speaks a text that is still being written: each sentence as soon as it is complete, the first clause sooner.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import cast

import msgspec

from motet_shared.audio import SAMPLE_BYTES
from motet_shared.bus import Bus
from motet_shared.errors import DeadlineExceeded, Overloaded, StreamBroken, Unavailable
from motet_shared.messages import Audio, Speak, SpeechResume, Usage
from motet_shared.sentences import Chunk, Cutter

from .instances import pick

RATE = 24_000  # Hz of the PCM
MOVES = 6  # of one stream: bounds what a text that kills its instances can do
PAUSE = 0.05  # seconds between two attempts without progress


@dataclass(slots=True)
class Outcome:
    """What there is to know of speech besides its sound; complete once the generator has ended."""

    instance: str | None = None
    moves: int = 0
    samples: int = 0
    usage: Usage = field(default_factory=Usage)  # tokens of the text, frames; after a move, of the last instance alone


@dataclass(slots=True)
class _Heard:
    """What the caller has: where the last whole sentence ends, and what there is of the next one."""

    text: int = 0
    samples: int = 0
    skip: int = 0

    def note(self, batch: Iterable[Audio]) -> int:
        """Add what has arrived; returns its samples."""
        count = 0
        for item in batch:
            here = len(item.data) // SAMPLE_BYTES
            count += here
            self.skip += here
            if item.text > self.text:
                self.text, self.samples, self.skip = item.text, self.samples + self.skip, 0
        return count

    def resume(self) -> SpeechResume:
        return SpeechResume(self.text, self.samples, self.skip)


async def speak(
    bus: Bus,
    request: Speak,
    outcome: Outcome | None = None,
    *,
    deadline: float | None = None,
    patience: float = 5.0,
    epoch: int = 0,
) -> AsyncGenerator[list[Audio], None]:
    """Yield the speech in batches of whatever has arrived.

    `deadline`: seconds for all of it. `patience`: seconds without progress, in which an instance may appear or restart,
    before the last retryable error is raised. Other errors are raised at once, Overloaded too unless sound was sent.
    """
    outcome = outcome or Outcome()
    now = bus.clock.now
    expires = None if deadline is None else now() + deadline
    give_up = now() + patience
    heard, known = _Heard(), 0
    while True:
        try:
            patient = give_up - now()
            outcome.instance = await pick(bus, "tts", request.model, avoid=outcome.instance, patience=patient)
            left = _left(expires, now())
            async with bus.open("tts", request, instance=outcome.instance, deadline=left, epoch=epoch) as stream:
                async for batch in cast(AsyncIterator[list[Audio]], stream.batches()):
                    outcome.samples += heard.note(batch)
                    yield batch
                if stream.end is not None and stream.end.usage is not None:
                    _add(outcome.usage, stream.end.usage)
                return
        except (StreamBroken, Unavailable, Overloaded) as error:
            if outcome.samples > known:
                give_up, known = now() + patience, outcome.samples
            outcome.moves += isinstance(error, StreamBroken)
            refused = isinstance(error, Overloaded) and not outcome.samples
            if now() >= give_up or outcome.moves > MOVES or refused:
                raise
        await bus.clock.sleep(PAUSE)
        request = msgspec.structs.replace(request, resume=heard.resume())


async def narrate(
    bus: Bus,
    request: Speak,
    pieces: AsyncIterator[str],
    outcome: Outcome | None = None,
    *,
    deadline: float | None = None,
    patience: float = 5.0,
    epoch: int = 0,
) -> AsyncGenerator[list[Audio], None]:
    """Speak `pieces` while they come; `request.text` is not used. The sound is that of `speak` for the whole text.

    Items are counted over the whole: their sentences, the times of their words, and their places in the text.
    `deadline`: seconds for each sentence.
    """
    outcome = outcome or Outcome()
    async for number, chunk in _chunks(pieces):
        part = msgspec.structs.replace(request, text=chunk.text, sentence=number)
        base = round(outcome.samples / RATE * 1000)
        spoken = speak(bus, part, outcome, deadline=deadline, patience=patience, epoch=epoch)
        async with aclosing(_counted(spoken, base, chunk)) as batches:
            async for batch in batches:
                yield batch


async def _chunks(pieces: AsyncIterator[str]) -> AsyncGenerator[tuple[int, Chunk], None]:
    cutter, number = Cutter(), 0
    async for piece in pieces:
        for chunk in cutter.push(piece):
            yield number, chunk
            number += 1
    for chunk in cutter.flush():
        yield number, chunk
        number += 1


async def _counted(
    batches: AsyncGenerator[list[Audio], None], base: int, chunk: Chunk
) -> AsyncGenerator[list[Audio], None]:
    """The items of one sentence, as those of the text that it is part of."""
    async with aclosing(batches):
        async for batch in batches:
            for item in batch:
                item.words = [(word, start + base, end + base) for word, start, end in item.words]
                item.text = chunk.end if item.text else 0
            yield batch


def _add(total: Usage, usage: Usage) -> None:
    total.prompt_tokens += usage.prompt_tokens
    total.completion_tokens += usage.completion_tokens


def _left(expires: float | None, now: float) -> float | None:
    if expires is None:
        return None
    if expires <= now:
        raise DeadlineExceeded("the deadline passed before the speech was complete")
    return expires - now
