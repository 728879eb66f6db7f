"""Chat: messages in, text out, on whichever tokenizer is alive.

    outcome = Outcome()
    async with aclosing(chat(bus, Chat(model="pocket-chat", messages=…, sampling=Sampling()), outcome)) as batches:
        async for batch in batches:  # list[Text]: all that has arrived
            print("".join(item.text for item in batch), end="", flush=True)
    print(outcome.end.status, outcome.end.usage)

If the tokenizer dies, the stream goes on at another one, which replays the token ids that were received: no text is
lost, repeated or changed (the seed is part of the request, so the noise goes on too). Leaving the generator early is
a remote cancel; `aclosing` makes that prompt.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import cast

import msgspec

from motet_shared.bus import Bus
from motet_shared.errors import DeadlineExceeded, Overloaded, StreamBroken, Unavailable
from motet_shared.messages import Chat, Complete, End, Resume, Text

from .models import check_known

MOVES = 6  # of one stream: bounds what a request that kills its tokenizers can do
PAUSE = 0.05  # seconds between two attempts without progress


@dataclass(slots=True)
class Outcome:
    """What there is to know of a reply besides its text; complete once the generator has ended."""

    end: End | None = None
    instance: str | None = None
    moves: int = 0


async def chat(
    bus: Bus,
    request: Chat | Complete,
    outcome: Outcome | None = None,
    *,
    deadline: float | None = None,
    patience: float = 5.0,
    epoch: int = 0,
) -> AsyncGenerator[list[Text], None]:
    """Yield the reply in batches of whatever has arrived.

    `deadline`: seconds for the whole reply. `patience`: seconds without progress, in which an instance may appear or
    restart, before the last retryable error is raised. Other errors are raised at once, Overloaded too unless text
    has been sent.
    """
    outcome = outcome or Outcome()
    now = bus.clock.now
    expires = None if deadline is None else now() + deadline
    give_up = now() + patience
    ids: list[int] = []
    text_len = known = 0
    while True:
        try:
            outcome.instance = await _pick(bus, request.model, outcome.instance, give_up - now())
            stream = bus.open(
                "tokenizer", request, instance=outcome.instance, deadline=_left(expires, now()), epoch=epoch
            )
            async with stream:
                async for batch in cast(AsyncIterator[list[Text]], stream.batches()):
                    text_len += _note(batch, ids)
                    yield batch
                outcome.end = stream.end
                return
        except (StreamBroken, Unavailable, Overloaded) as error:
            if len(ids) > known:
                give_up, known = now() + patience, len(ids)
            outcome.moves += isinstance(error, StreamBroken)
            if now() >= give_up or outcome.moves > MOVES or (isinstance(error, Overloaded) and not ids):
                raise
        await bus.clock.sleep(PAUSE)
        request = msgspec.structs.replace(request, resume=Resume(ids, text_len) if ids else None)


def _note(batch: list[Text], ids: list[int]) -> int:
    """Add the token ids of `batch` to `ids`; returns its characters, those of tool arguments included."""
    length = 0
    for item in batch:
        ids += item.ids
        length += len(item.text)
        if item.tools:
            length += sum(len(tool.arguments) for tool in item.tools)
    return length


def _left(expires: float | None, now: float) -> float | None:
    if expires is None:
        return None
    if expires <= now:
        raise DeadlineExceeded("the deadline passed before the reply was complete")
    return expires - now


async def _pick(bus: Bus, model: str, avoid: str | None, patience: float) -> str:
    """The least busy ready tokenizer for `model`, another one than `avoid` if there is a choice."""
    directory = bus.directory
    check_known(directory, model)
    ready = directory.ready("tokenizer", model=model)
    if not ready:
        try:
            await directory.wait_for(lambda d: bool(d.ready("tokenizer", model=model)), max(patience, 0.0))
        except TimeoutError:
            raise Unavailable(f"no tokenizer for {model!r} is ready; retry in a moment", param="model") from None
        ready = directory.ready("tokenizer", model=model)
    names = [beat.instance for beat in ready]
    names = [name for name in names if name != avoid] or names
    return min(names, key=lambda name: (directory.outstanding(name), random.random()))
