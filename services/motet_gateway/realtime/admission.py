"""Admit the work of a session for its tenant, and account for it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from motet_gateway.context import GatewayContext
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
from motet_shared.messages import Audio, Chat, Text

from .pictures import shown, with_placeholders


class TenantAdmission:
    """Admit the work of one session by the limits of its tenant."""

    def __init__(self, service: GatewayContext, tenant: Tenant):
        self._service, self._tenant = service, tenant

    def receive_audio(self, pcm_bytes: int, rate: int) -> None:
        """Charge audio of the client. Raises RateLimited if it has sent too much."""
        if pcm_bytes:
            self._tenant.spend(self._tenant.audio, sound_length(pcm_bytes, rate))

    def recognizer(self, name: str) -> str:
        """Return the model that transcribes. Raises UnknownModel or Unavailable."""
        return model_of(self._service.bus.directory, "asr", name)

    def admit_reply(
        self, settings: ReplySettings, messages: list[dict[str, Any]]
    ) -> TenantReplyAccount:
        """Take a ticket for one reply.

        Raises RateLimited, Overloaded or Draining, ContextTooLong for text that cannot fit.
        """
        self._service.admit(settings.model)
        self._tenant.count_request()
        size = PromptSize.of(self._service.bus.directory, "tokenizer", settings.model, self._tenant)
        size.check_tools(list(settings.tools))
        size.check_text(with_placeholders(messages), "response")
        limit = REPLY_TOKENS if settings.max_tokens is None else settings.max_tokens
        ticket = self._tenant.take(
            tokens=messages_tokens(messages) + limit, audio=SECOND if settings.speaks else 0
        )
        return TenantReplyAccount(self._service, self._tenant, ticket)


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
