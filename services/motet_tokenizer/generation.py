"""Run one request between client and decode: convert tokens to text, move if decode is lost."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import chain
from typing import cast

from msgspec import structs
from msgspec.structs import replace

from motet_shared.errors import (
    BlobError,
    InternalError,
    MotetError,
    Overloaded,
    StreamBroken,
    Unavailable,
    UnsupportedParameter,
)
from motet_shared.messages import (
    Body,
    Chat,
    CountedTokens,
    End,
    Generate,
    PromptPiece,
    PromptScores,
    Resume,
    StatedTokens,
    States,
    TargetText,
    Text,
    TextLogprob,
    TokenLogprob,
    Tokens,
    Usage,
)
from motet_shared.process.telemetry import Stopwatch
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call
from motet_tokenizer.config import TokenizerConfig
from motet_tokenizer.encoding.vocabulary import Vocabulary
from motet_tokenizer.prefix_index import ROLE
from motet_tokenizer.prompt_images import PromptImages
from motet_tokenizer.prompt_parts import PromptParts
from motet_tokenizer.router import PromptLoad, Router
from motet_tokenizer.text import TextState

PAUSE = 0.05  # seconds before another attempt after a failed one


@dataclass(slots=True)
class RequestCounters:
    """Count the requests of one process."""

    waiting_for_decode: int = 0
    waiting_by_model: dict[str, int] = field(default_factory=dict)  # `asdict` cannot copy a Counter
    failovers: int = 0
    tokens: int = 0
    prompt_tokens: int = 0

    def note_waiting(self, model: str, change: int) -> None:
        """Count requests that begin (1) or cease (-1) to wait for an instance of a model."""
        self.waiting_for_decode += change
        self.waiting_by_model[model] = self.waiting_by_model.get(model, 0) + change


@dataclass(slots=True, frozen=True)
class GenerationContext:
    """Hold the objects that all generations of a process share."""

    bus: Bus
    router: Router
    config: TokenizerConfig
    counters: RequestCounters


class Generation:
    """Generate one reply: `run` returns when the text is complete.

    `request.output` grows with the emitted tokens, across all decode instances.
    """

    def __init__(
        self,
        call: Call,
        shared: GenerationContext,
        vocabulary: Vocabulary,
        request: Generate,
        text: TextState,
        stopwatch: Stopwatch,
    ):
        self._call = call
        self._shared = shared
        self._vocabulary = vocabulary
        self._request = request
        self._text = text
        self._stopwatch = stopwatch
        self._end: End | None = None
        self._moves = 0
        self._prompt_tokens = len(request.prompt)
        self.images: PromptImages | None = None  # the pictures of the prompt
        self.returns_prompt = False  # send the ids of the prompt
        self.prompt_parts: PromptParts | None = None  # log-probabilities of the prompt to send
        self.chat: Chat | None = None  # what the prompt was made of
        self.target = ""  # the only target that may serve the request; empty: any
        self._served_by = ""  # target to name in the next piece of text
        # Loop time, set by a move, until which overload of other instances is retried.
        self._retry_until = 0.0

    def resume(self, resume: Resume) -> None:
        """Take over the stream of a client that lost its tokenizer.

        Raises StreamBroken if the client's text is not the one that these ids give here.
        """
        self._vocabulary.check_ids(resume.ids, "resume.ids")
        piece = self._text.feed(resume.ids)
        self._request.output += piece.ids
        if len(piece.ids) != len(resume.ids) or self._text.length != resume.text_len:
            raise StreamBroken(
                f"resume: {len(resume.ids)} ids give {len(piece.ids)} tokens and {self._text.length} characters, "
                f"the client has {resume.text_len}; start again without resume"
            )

    async def run(self) -> None:
        """Send every piece of text, then set the usage and status that the call ends with."""
        await self._send_prompt()
        if self._is_full and not self._text.status:
            await self._finish("length")
        avoid: set[str] = set()
        while not self._text.status:
            instance = await self._choose(avoid)
            if self.images is not None:
                await self._prepare(self.images, instance)
            try:
                await self._follow(instance)
            except Overloaded as error:
                avoid.add(instance)
                await self._try_another(error, avoid)
            except UnsupportedParameter as error:
                # An engine further on in the chain may be able to do it.
                router, model = self._shared.router, self._request.model
                avoid |= {instance, *router.of_target(router.target_of(instance, model), model)}
                await self._try_another(error, avoid)
            except BlobError as error:
                await self._encode_images_again(error)
            except (StreamBroken, Unavailable) as error:
                if not self._text.status:  # else only the stream's End is missing
                    await self._move(instance, error)
                    avoid.clear()
        self._finish_call()

    async def _send_prompt(self) -> None:
        """Send what is known of the prompt before decode begins."""
        if self.returns_prompt:
            await self._call.send(PromptPiece(0, self._request.prompt))
        if self.prompt_parts is not None:
            for part in self.prompt_parts.take():
                await self._call.send(part)

    @property
    def _is_full(self) -> bool:
        """Return True if decode has nothing to add, as all tokens that are allowed are there."""
        scored = self.prompt_parts is None or self.prompt_parts.is_complete
        return scored and self._request.sampling.max_tokens <= self._text.tokens

    # ------------------------------------------------------------------------------------ instances
    async def _choose(self, avoid: set[str]) -> str:
        router, counters = self._shared.router, self._shared.counters
        load = self._load()
        instance = router.pick(self._request.model, avoid, load)
        if instance is not None:
            return instance
        model = self._vocabulary.name  # the planner counts adapters as their base model
        counters.note_waiting(model, 1)
        try:
            with self._stopwatch.stage("wait"):
                return await router.wait(self._request.model, avoid, self._wait_limit(), load)
        finally:
            counters.note_waiting(model, -1)

    def _wait_limit(self) -> float:
        """Return the seconds to wait for decode: by its measured start or `decode_wait`."""
        presence = self._shared.bus.directory.presence
        wait = presence.patience(ROLE, self._vocabulary.name, self._shared.config.decode_wait)
        left = self._call.remaining()
        return wait if left is None else max(0.0, min(wait, left))

    def _load(self) -> PromptLoad:
        """Return what decode has to prefill: the prompt, and the output emitted before a move."""
        request = self._request
        names = request.prompt if self.images is None else self.images.names()
        return PromptLoad([*names, *request.output], request.priority, self.target)

    async def _try_another(self, error: MotetError, avoid: set[str]) -> None:
        """Raise `error` if no instance is left, but retry for some time after a move."""
        if self._shared.router.has(self._request.model, avoid, self.target):
            return
        if asyncio.get_running_loop().time() >= self._retry_until:
            raise error
        avoid.clear()
        await asyncio.sleep(PAUSE)

    async def _encode_images_again(self, error: BlobError) -> None:
        """Encode the pictures again: the encoder instance has died, or evicted their embeddings."""
        self._count_move(error)
        if self.images is not None:
            with self._stopwatch.stage("media"):
                await self.images.encode_again(error)

    def _count_move(self, error: MotetError) -> None:
        """Raise `error` after too many moves, as the request itself may kill its instances."""
        self._moves += 1
        if self._moves > self._shared.config.max_moves:
            raise error

    async def _move(self, instance: str, error: MotetError) -> None:
        """Prepare to continue at another instance. Raises `error` after too many moves."""
        self._count_move(error)
        self._shared.counters.failovers += 1
        # Unavailable: absent or draining. Broken streams are reported to the directory by the wire.
        if not isinstance(error, StreamBroken):
            self._shared.bus.directory.suspect(instance)
        self._retry_until = asyncio.get_running_loop().time() + self._wait_limit()
        if self._moves > 1:
            await asyncio.sleep(PAUSE)

    # --------------------------------------------------------------------------------------- tokens
    async def _follow(self, instance: str) -> None:
        """Forward what one instance emits, until its End or until the text is complete."""
        text = self._text
        self._served_by = self._shared.router.target_of(instance, self._request.model)
        request = self._request_for(instance)
        self._prompt_tokens = len(request.prompt)
        stream = self._shared.bus.open(
            ROLE,
            request,
            instance=instance,
            window=self._shared.config.window,
            deadline=self._call.remaining(),
            epoch=self._call.epoch,
        )
        stream.sink = self._forward_plain
        async with stream:
            async for batch in stream.batches():
                if text.status:  # the model continues beyond the end of the reply
                    return
                await self._forward(batch)
                if text.stopped:  # decode does not know stop strings: leaving cancels its stream
                    return
        self._end = stream.end
        if stream.end is not None and not text.status:
            await self._finish(stream.end.status)

    async def _prepare(self, images: PromptImages, instance: str) -> None:
        """Bring the pictures into the form that the instance takes."""
        with self._stopwatch.stage("media"):
            await images.prepare(self._shared.router.card_at(instance, self._request.model))

    def _request_for(self, instance: str) -> Generate:
        """Return the request as the instance takes it: with pictures, or with the chat itself."""
        request = self._request
        card = self._shared.router.card_at(instance, request.model)
        if self.images is not None:
            return self.images.request_for(card, request)
        if self.chat is None or card is None or not card.takes_chats:
            return request
        return replace(request, chat=self.chat)

    async def _forward(self, bodies: list[Body]) -> None:
        if self.prompt_parts is not None:
            bodies = await self._forward_scores(self.prompt_parts, bodies)
            if not bodies:
                return
        if len(bodies) > 1 and any(isinstance(body, StatedTokens) for body in bodies):
            for body in bodies:  # one of them may begin a tool call
                await self._forward([body])
            return
        for body in bodies:
            if not isinstance(body, Tokens):
                raise InternalError(
                    f"{ROLE} sent {type(body).__name__} to a request that is answered with tokens"
                )
        batch = cast(list[Tokens], bodies)
        ids, logprobs = _ids_of(batch), batch[0].logprobs
        if len(batch) > 1:
            logprobs = list(chain.from_iterable([tokens.logprobs or () for tokens in batch]))
        piece = self._text.feed(ids) if ids or not isinstance(batch[-1], StatedTokens) else None
        if isinstance(batch[0], StatedTokens) and not self._text.calls_tools:
            # A talker speaks what it gets states of; tool calls are not spoken.
            await self._call.send(States(batch[0].states, self._prompt_tokens))
        if piece is None:
            return
        if isinstance(batch[-1], CountedTokens):
            self._prompt_tokens = batch[-1].prompt_tokens
        if not self._request.output:
            piece.prompt_tokens = self._prompt_tokens
        self._request.output += piece.ids
        self._shared.counters.tokens += len(piece.ids)
        if logprobs:
            shown = len(piece.ids) - self._text.ended_by_token
            hidden = self._text.hidden
            piece.logprobs = [
                self._text_logprob(logprob)
                for index, logprob in enumerate(logprobs[:shown])
                if index not in hidden
            ]
            # Of a scored prompt, decode sends the stop token's, too, which is no part of the text.
            piece.logprobs += map(self._text_logprob, logprobs[len(ids) :])
        await self._call.send(self._named(piece) if self._served_by else piece)

    def _forward_plain(self, bodies: list[Body]) -> bool:
        """Forward tokens at once that bring nothing but text; return False for all others.

        Waking the task costs more than the rest of such a token.
        """
        call, text = self._call, self._text
        is_first = not self._request.output or self._served_by  # its piece says more
        if is_first or text.status or call.credit_left < 1:
            return False
        for body in bodies:
            if type(body) is not Tokens or body.logprobs is not None:
                return False
        ids = _ids_of(cast(list[Tokens], bodies))
        piece = text.feed_plain(ids)
        if piece is None:
            return False
        self._request.output += ids
        self._shared.counters.tokens += len(ids)
        call.push(piece)
        return True

    def _named(self, piece: Text) -> TargetText:
        """Return a piece with the target that generates from here on."""
        name, self._served_by = self._served_by, ""
        return TargetText(**structs.asdict(piece), target=name)

    async def _forward_scores(self, parts: PromptParts, bodies: list[Body]) -> list[Body]:
        """Send the parts of the prompt that are complete; return the other items."""
        rest: list[Body] = []
        for body in bodies:
            if isinstance(body, PromptScores):
                for part in parts.add(body):
                    await self._call.send(part)
            else:
                rest.append(body)
        return rest

    def _text_logprob(self, logprob: TokenLogprob) -> TextLogprob:
        spell = self._vocabulary.token_bytes
        return TextLogprob(
            spell(logprob.id), logprob.logprob, [(spell(i), value) for i, value in logprob.top]
        )

    # ------------------------------------------------------------------------------------------ end
    async def _finish(self, status: str) -> None:
        rest = self._text.finish(status)
        if rest.text or rest.tools or rest.reasoning:
            await self._call.send(rest)

    def _finish_call(self) -> None:
        self._shared.router.note_reply(self._text.tokens)
        encoded = {
            sense: 0 if self.images is None else self.images.tokens(self._prompt_tokens, sense)
            for sense in ("image", "audio")
        }
        usage = Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._text.tokens,
            reasoning_tokens=self._text.reasoning_tokens,
            image_tokens=encoded["image"],
            audio_tokens=encoded["audio"],
        )
        if self._end is not None:
            self._stopwatch.merge(self._end.timing)
            if self._end.usage is not None:
                usage.cached_tokens = min(self._end.usage.cached_tokens, usage.prompt_tokens)
                usage.accepted_tokens = self._end.usage.accepted_tokens
                usage.rejected_tokens = self._end.usage.rejected_tokens
        self._call.finish(self._text.status, usage, self._stopwatch.as_dict(), self._text.stop)


def _ids_of(batch: list[Tokens]) -> list[int]:
    """Return the ids of all tokens of a batch."""
    if len(batch) == 1:
        return batch[0].ids
    return list(chain.from_iterable([tokens.ids for tokens in batch]))
