"""Chat: messages in, text out, with failover between tokenizers.

    outcome = Outcome()
    request = Chat(model="pocket-chat", messages=…, sampling=Sampling())
    async with aclosing(chat(bus, request, outcome)) as batches:
        async for batch in batches:  # list[Text]: all that has arrived
            print("".join(item.text for item in batch), end="", flush=True)
    print(outcome.end.status, outcome.end.usage)

If the tokenizer dies, the stream continues at another one, which replays the token ids that were
received: no text is lost, repeated or changed (the seed is part of the request, so the noise
continues too). Leaving the generator early is a remote cancel; `aclosing` makes that prompt.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import msgspec

from motet_pipelines.answers import Answers
from motet_shared.messages import Chat, Complete, End, PromptPiece, Resume, States, TargetText, Text
from motet_shared.wire.bus import Bus
from motet_shared.wire.epochs import NO_EPOCH, Epoch
from motet_shared.wire.failover import Failover, StreamMoves

from .models import CHAT_ROLES, check_known

# Offered text, and nothing but text, while the reader of the batches waits. Returns True if it has
# taken all of it, which then comes in no batch; the reader's task sleeps on. It calls its second
# argument, which records the text, before that has an effect, and has all its effects then.
Sink = Callable[[list[Text], Callable[[], None]], bool]


@dataclass(slots=True, kw_only=True)
class Outcome(StreamMoves):
    """Result of a reply besides its text; complete once the generator has ended."""

    end: End | None = None
    targets: list[str] = field(default_factory=list)  # those that generated it, in order
    is_recorded: bool = False  # whether an earlier process has received all of it
    sink: Sink | None = None  # of the reader, for pipelines that yield a chat's batches as they are


_kinds: Any = list[Text | TargetText | PromptPiece | States]  # the last with `return_states`
_batches: msgspec.msgpack.Decoder[list[Text | PromptPiece]] = msgspec.msgpack.Decoder(_kinds)
_ends: msgspec.msgpack.Decoder[End | None] = msgspec.msgpack.Decoder(End | None)


def chat(
    bus: Bus,
    request: Chat | Complete,
    outcome: Outcome | None = None,
    *,
    deadline: float | None = None,
    patience: float = 5.0,
    epoch: Epoch = NO_EPOCH,
    sink: Sink | None = None,
) -> AsyncGenerator[list[Text], None]:
    """Yield the reply as `chat_with_prompt` does, to a request that wants nothing of its prompt."""
    batches = chat_with_prompt(
        bus, request, outcome, deadline=deadline, patience=patience, epoch=epoch, sink=sink
    )
    return cast(AsyncGenerator[list[Text], None], batches)


async def chat_with_prompt(
    bus: Bus,
    request: Chat | Complete,
    outcome: Outcome | None = None,
    *,
    deadline: float | None = None,
    patience: float = 5.0,
    epoch: Epoch = NO_EPOCH,
    sink: Sink | None = None,
) -> AsyncGenerator[list[Text | PromptPiece], None]:
    """Yield the reply in batches of whatever has arrived, behind the pieces of its prompt.

    `deadline`: seconds for the whole reply. `patience`: seconds without progress, in which an
    instance may appear or restart, before the last retryable error is raised. Other errors are
    raised at once, Overloaded too unless text has been sent. With `request.resume`, the reply goes
    on behind what an earlier caller has received.
    """
    outcome = outcome or Outcome()
    ids: list[int] = list(request.resume.ids) if request.resume is not None else []
    text_len = request.resume.text_len if request.resume is not None else 0
    prompt = _PromptPosition()
    answers = Answers(_recorded(request), _batches, _ends)
    while (batch := await answers.recorded()) is not None:
        text_len += _note(batch, ids, outcome.targets)
        prompt.unknown(batch)
        yield batch
    if answers.end is not None:
        outcome.end, outcome.is_recorded = answers.end, True
        return
    if ids:
        request = msgspec.structs.replace(request, resume=Resume(ids, text_len))
    epoch = answers.epoch(epoch)
    moves = Failover(
        bus,
        "tokenizer",
        bus.directory.base_of(request.model),  # tokenizers do not announce adapters
        outcome,
        lambda: len(ids) + prompt.scored,
        patience=patience,
        deadline=deadline,
        check=partial(check_known, model=request.model),
        behind=CHAT_ROLES[1:],
    )

    def offer(batch: list[Any]) -> bool:
        nonlocal text_len
        for item in batch:
            if type(item) is not Text or item.tools or item.logprobs is not None or item.reasoning:
                return False
        if sink is None or not answers.is_live:
            return False
        if not sink(batch, partial(answers.record_now, batch)):
            return False
        text_len += _note(batch, ids, outcome.targets)
        return True

    async with answers.live():
        while True:
            async with moves as instance:
                stream = bus.open(
                    "tokenizer", request, instance=instance, deadline=moves.left(), epoch=epoch
                )
                async with stream:
                    batches = cast(AsyncIterator[list[Text | PromptPiece]], stream.batches())
                    async for batch in batches:
                        if sink is not None and answers.is_live:
                            stream.sink = offer
                        if new := prompt.unknown(batch):
                            # States are not kept: their blobs are read once.
                            if kept := [one for one in new if not isinstance(one, States)]:
                                await answers.record(kept)
                            text_len += _note(new, ids, outcome.targets)
                            yield new
                    await answers.finish(stream.end)
                    outcome.end = stream.end
                    return
            resume = Resume(ids, text_len) if ids else None
            request = msgspec.structs.replace(request, resume=resume)


def _recorded(request: Chat | Complete) -> Chat | Complete:
    """Return the request as another process would make it: media are lent by the one that asks."""
    if isinstance(request, Chat) and request.images:
        return msgspec.structs.replace(request, images=[])
    return request


@dataclass(slots=True)
class _PromptPosition:
    """Track which parts of the prompt were received, as every attempt sends all of them."""

    scored: int = 0  # tokens whose log-probabilities have been received
    has_ids: bool = False

    def unknown(self, batch: list[Text | PromptPiece]) -> list[Text | PromptPiece]:
        """Return `batch` without pieces of the prompt that have been received."""
        if not isinstance(batch[0], PromptPiece):  # they precede all text
            return batch
        return [one for one in batch if not isinstance(one, PromptPiece) or self._is_new(one)]

    def _is_new(self, piece: PromptPiece) -> bool:
        if piece.logprobs is None:
            is_new, self.has_ids = not self.has_ids, True
            return is_new
        end = piece.start + len(piece.ids)
        is_new, self.scored = end > self.scored, max(end, self.scored)
        return is_new


def _note(batch: list[Text | PromptPiece], ids: list[int], targets: list[str]) -> int:
    """Add what `batch` has to `ids` and `targets`; return the characters of its text."""
    length = 0
    for item in batch:
        if isinstance(item, PromptPiece | States):
            continue
        ids += item.ids
        if isinstance(item, TargetText) and item.target not in targets[-1:]:
            targets.append(item.target)
        length += received_length(item)
    return length


def received_length(item: Text) -> int:
    """Return the characters of reasoning, text and arguments, as `Resume.text_len` counts them."""
    length = len(item.reasoning) + len(item.text)
    if item.tools:
        length += sum(len(tool.arguments) for tool in item.tools)
    return length
