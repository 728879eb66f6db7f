"""Admit the work of a session for its tenant, and account for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import msgspec

from motet_gateway.context import GatewayContext
from motet_gateway.kept.session import KeptSession
from motet_gateway.openai.aliases import model_of
from motet_gateway.openai.chat_images import leased_images
from motet_gateway.openai.prompt_size import PromptSize
from motet_gateway.operations.metrics import Track
from motet_gateway.tenancy.tenant import SECOND, Tenant, Ticket
from motet_gateway.tenancy.usage import (
    REPLY_TOKENS,
    ReplyMeter,
    SpeechMeter,
    messages_tokens,
    prompt_tokens,
    sound_length,
)
from motet_pipelines.chat.chat import Outcome
from motet_pipelines.voice.conversation.settings import ReplySettings
from motet_pipelines.voice.speak import Outcome as SpeechOutcome
from motet_shared.messages import Audio, Chat, Text

from .pictures import shown, with_placeholders


class TenantAdmission:
    """Admit the work of one session by the limits of its tenant."""

    def __init__(self, service: GatewayContext, tenant: Tenant, kept: KeptSession | None = None):
        """`kept`: what another gateway has admitted of the session is not refused here."""
        self._service, self._tenant, self._kept = service, tenant, kept
        self.asked = 0  # times that something was to be admitted

    def receive_audio(self, pcm_bytes: int, rate: int) -> None:
        """Charge audio of the client. Raises RateLimited if it has sent too much."""
        if not pcm_bytes:
            return
        with self._decided() as is_admitted:
            if not is_admitted:
                self._tenant.spend(self._tenant.audio, sound_length(pcm_bytes, rate))

    @contextmanager
    def _decided(self) -> Iterator[bool]:
        """Decide as the gateway before did, whose refusals are noted; True: it has admitted this."""
        self.asked += 1
        if self._kept is None:
            yield False
            return
        with self._kept.deciding(f"refusal {self.asked}") as is_admitted:
            yield is_admitted

    def recognizer(self, name: str) -> str:
        """Return the model that transcribes. Raises UnknownModel or Unavailable."""
        return model_of(self._service.bus.directory, "asr", name)

    def admit_reply(
        self, settings: ReplySettings, messages: list[dict[str, Any]]
    ) -> TenantReplyAccount:
        """Take a ticket for one reply.

        Raises RateLimited, Overloaded or Draining, ContextTooLong for text that cannot fit.
        """
        with self._decided() as is_admitted:
            if not is_admitted:
                self._check_reply(settings, messages)
            limit = REPLY_TOKENS if settings.max_tokens is None else settings.max_tokens
            ticket = self._tenant.take_now(
                tokens=messages_tokens(messages) + limit,
                audio=SECOND if settings.speaks else 0,
                is_admitted=is_admitted,
            )
        return TenantReplyAccount(self._service, self._tenant, ticket)

    def _check_reply(self, settings: ReplySettings, messages: list[dict[str, Any]]) -> None:
        self._service.admit(settings.model)
        self._tenant.count_request()
        size = PromptSize.of(self._service.bus.directory, "tokenizer", settings.model, self._tenant)
        size.check_tools(list(settings.tools))
        size.check_text(with_placeholders(messages), "response")


class TenantReplyAccount:
    """Account for one reply with the tenant's ticket and the gateway's metrics."""

    def __init__(self, service: GatewayContext, tenant: Tenant, ticket: Ticket):
        self._service, self._tenant, self._ticket = service, tenant, ticket
        self._track: Track | None = None
        self._speech = SpeechMeter(ticket.audio)

    @asynccontextmanager
    async def run(self, request: Chat, outcome: Outcome) -> AsyncIterator[Chat]:
        """Yield the request with the tenant's rights, its images leased to the services."""
        plain, pictures = await shown(request.messages, self._service.config)
        rights = self._tenant.rights
        async with await leased_images(self._service, pictures) as images:
            request = msgspec.structs.replace(
                request,
                messages=plain,
                images=images,
                priority=rights.priority(None),
                tenant=rights.share(""),
                max_context=rights.max_context,
            )
            meter = ReplyMeter(self._ticket, prompt_tokens(request))
            self._speech = SpeechMeter(self._ticket.audio)
            with self._service.metrics.begin(request.model, outcome, meter) as self._track:
                yield request

    def spoke(self, model: str, speech: SpeechOutcome) -> None:
        """Count the speech of the reply."""
        self._service.metrics.speech.observe(model, speech.playout)

    def receive(self, batch: Sequence[Text] | Sequence[Audio]) -> None:
        """Charge what has arrived."""
        if isinstance(batch[0], Audio):
            self._speech.got(sum(len(item.data) for item in batch if isinstance(item, Audio)))
        elif self._track is not None:
            self._track.got(batch)

    def settle(self) -> None:
        self._ticket.settle()

    def release(self) -> None:
        self._ticket.release()
