"""Speak one utterance over a socket, sentence by sentence, while its text still comes."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from motet_gateway.audio.encoder import Encoder, make_encoder
from motet_gateway.audio.speech import encoded, usage_of
from motet_gateway.context import GatewayContext
from motet_gateway.http.problems import Problem
from motet_gateway.tenancy.tenant import Tenant
from motet_gateway.tenancy.usage import SpeechMeter, speech_length
from motet_pipelines.voice.speak import RATE, Outcome, sentences, speak_sentence
from motet_shared.errors import DeadlineExceeded
from motet_shared.messages import Audio, Speak
from motet_shared.text.sentences import Chunk

from . import events
from .outbox import Outbox
from .texts import Texts, Utterance

_CHANNELS = 1


class Speaker:
    """Speak one utterance.

    The audio of all its sentences equals that of `POST /v1/audio/speech` for the whole text. With
    `stream_audio` one encoder makes one stream of it, else each sentence is a file.
    """

    def __init__(
        self,
        service: GatewayContext,
        outbox: Outbox,
        tenant: Tenant,
        texts: Texts,
        request_id: str,
    ):
        self._service, self._outbox, self._tenant, self._texts = service, outbox, tenant, texts
        self._request_id = request_id
        self._outcome = Outcome()
        self._sentence = _Sentence()
        self._spoken = 0  # sentences that were begun

    async def run(self, utterance: Utterance) -> None:
        """Send all audio. Raises MotetError, and ClientGone once the client has left."""
        settings = utterance.settings
        with self._outbox.deciding(utterance.sequence, utterance.sequence) as is_admitted:
            if not is_admitted:
                self._tenant.count_request()
            ticket = self._tenant.take_now(is_admitted=is_admitted)
        with ticket:
            try:
                await self._run(utterance)
            finally:
                self._service.metrics.speech.observe(settings.model, self._outcome.playout)

    async def _run(self, utterance: Utterance) -> None:
        settings = utterance.settings
        request = settings.config.as_request(
            settings.model,
            "",
            self._request_id,
            cloned=settings.cloned is not None,
            priority=self._tenant.rights.priority(None),
            draw=utterance.sequence,
        )
        streams = settings.config.stream_audio
        encoder = make_encoder(settings.config.response_format)
        async with aclosing(self._units(utterance)) as units:
            async for number, chunk in units:
                if not streams and number:
                    encoder = make_encoder(settings.config.response_format)
                with self._charged(utterance, number, chunk) as meter:
                    await self._say(utterance, request, number, chunk, encoder, meter)
                utterance.unspoken -= chunk.end - chunk.start
                await self._send(utterance, self._sentence.done(utterance, self._texts.credit))
        if streams and self._outcome.samples:
            await self._send_audio(utterance, await encoded(encoder))

    async def _units(self, utterance: Utterance) -> AsyncGenerator[tuple[int, Chunk], None]:
        """Yield what is spoken at a time: sentences, or the whole text."""
        patience = self._service.config.request_timeout
        try:
            async with aclosing(utterance.pieces(patience)) as pieces:
                if utterance.settings.config.split_granularity == "none":
                    text = "".join([piece async for piece in pieces])
                    if text.strip():
                        yield 0, Chunk(text, 0, len(text))
                    return
                async with aclosing(sentences(pieces)) as found:
                    async for number, chunk in found:
                        yield number, chunk
        except TimeoutError:
            raise DeadlineExceeded(
                f"no text came for {patience:g} s (--request-timeout); send `input.done` earlier"
            ) from None

    @contextmanager
    def _charged(self, utterance: Utterance, number: int, chunk: Chunk) -> Iterator[SpeechMeter]:
        """Hold the probable length of a sentence. Raises RateLimited if it is not available."""
        length = speech_length(chunk.text, utterance.settings.config.speed)
        name = f"{utterance.sequence} {number}"
        with self._outbox.deciding(name, utterance.sequence) as is_admitted:
            hold = self._tenant.hold_audio(length, is_admitted=is_admitted)
        try:
            yield SpeechMeter(hold)
        finally:
            hold.settle()

    async def _say(
        self,
        utterance: Utterance,
        request: Speak,
        number: int,
        chunk: Chunk,
        encoder: Encoder,
        meter: SpeechMeter,
    ) -> None:
        """Send one sentence, from `audio.start` to its last audio."""
        config = self._service.config
        settings = utterance.settings
        self._sentence = _Sentence(number, self._outcome.samples)
        self._spoken = number + 1
        await self._send(utterance, self._sentence.start(utterance, chunk.text))
        batches = speak_sentence(
            self._service.bus,
            request,
            number,
            chunk,
            self._outcome,
            deadline=config.request_timeout,
            patience=config.patience,
            cloned=settings.cloned,
        )
        whole = bytearray()
        async with aclosing(batches):
            async for batch in batches:
                self._sentence.note(batch)
                pcm = b"".join([item.data for item in batch])
                meter.got(len(pcm))
                data = await encoded(encoder, pcm) if pcm else b""
                if settings.config.stream_audio:
                    await self._send_audio(utterance, data)
                else:
                    whole += data
        if not settings.config.stream_audio:
            await self._send_audio(utterance, bytes(whole) + await encoded(encoder))
        if settings.config.word_timestamps:
            await self._send(utterance, self._sentence.words_event(utterance))

    async def _send(self, utterance: Utterance, event: bytes) -> None:
        await self._outbox.send(utterance.sequence, lambda: (event,))

    async def _send_audio(self, utterance: Utterance, data: bytes) -> None:
        """Send audio; waits while the client does not read, so that its speech gets no credit."""
        if not data:
            return
        self._sentence.total_bytes += len(data)
        if utterance.settings.config.word_timestamps:
            await self._send(utterance, self._sentence.audio_event(utterance, data))
        else:
            await self._outbox.send(utterance.sequence, lambda: (data,), binary=True)

    def ending(self, utterance: Utterance, problem: Problem | None) -> list[bytes]:
        """Return the last events of an utterance. `problem`: the error that ended it."""
        utterance.unspoken = 0
        found: list[bytes] = []
        if problem is not None:
            found.append(events.error(problem))
        if self._sentence.is_open:
            failed = problem is not None
            found.append(self._sentence.done(utterance, self._texts.credit, failed=failed))
        done = events.event(
            "session.done",
            utterance_index=utterance.index,
            total_sentences=self._spoken,
            error=problem is not None,
            cancelled=problem is None and utterance.refused,
            credit=self._texts.credit,
            usage=usage_of(self._outcome),
        )
        return [*found, done]


class _Sentence:
    """Render the events of one sentence.

    begin: samples of the utterance before it.
    """

    def __init__(self, number: int = 0, begin: int = 0):
        self.is_open = False
        self.total_bytes = 0
        self._number, self._begin = number, begin
        self._chunks = 0
        self._words: dict[int, list[tuple[str, int, int]]] = {}

    def note(self, batch: list[Audio]) -> None:
        """Keep the times of words."""
        for item in batch:
            if item.words:
                self._words[item.sentence] = item.words

    def start(self, utterance: Utterance, text: str) -> bytes:
        self.is_open = True
        config = utterance.settings.config
        return self._event(
            "audio.start",
            utterance,
            sentence_text=text,
            format=config.response_format,
            sample_rate=events.sample_rate(config.response_format),
            channels=_CHANNELS,
        )

    def done(self, utterance: Utterance, credit: int, *, failed: bool = False) -> bytes:
        self.is_open = False
        return self._event(
            "audio.done",
            utterance,
            total_bytes=self.total_bytes,
            error=failed,
            credit=credit,
        )

    def audio_event(self, utterance: Utterance, pcm: bytes) -> bytes:
        """Return audio in JSON, which a client asks for with `word_timestamps`."""
        return self._chunk(utterance, pcm, None)

    def words_event(self, utterance: Utterance) -> bytes:
        """Return the times of the words, in ms from the beginning of the sentence."""
        base = round(self._begin / RATE * 1000)
        words = [word for number in sorted(self._words) for word in self._words[number]]
        times = [
            {"word": word, "start_ms": start - base, "end_ms": end - base}
            for word, start, end in words
        ]
        return self._chunk(utterance, b"", times)

    def _chunk(self, utterance: Utterance, pcm: bytes, times: list[Any] | None) -> bytes:
        self._chunks += 1
        return self._event(
            "audio.chunk",
            utterance,
            chunk_id=self._chunks - 1,
            sample_rate=RATE,
            channels=_CHANNELS,
            audio_b64=base64.b64encode(pcm).decode(),
            timestamps=times,
        )

    def _event(self, kind: str, utterance: Utterance, **fields: Any) -> bytes:
        return events.event(
            kind, utterance_index=utterance.index, sentence_index=self._number, **fields
        )
