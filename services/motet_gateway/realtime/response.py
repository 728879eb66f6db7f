"""Run one response: a chat request, reported as the event sequence of the realtime protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from motet_gateway.context import GatewayContext
from motet_gateway.http.asgi import ClientGone
from motet_gateway.http.problems import Problem
from motet_gateway.openai.chat_images import leased_images
from motet_gateway.openai.requests import random_seed
from motet_gateway.operations.metrics import Track
from motet_gateway.tenancy.tenant import Tenant, Ticket
from motet_gateway.tenancy.usage import ReplyMeter, SpeechMeter, prompt_tokens
from motet_pipelines.chat.chat import Outcome, chat
from motet_pipelines.voice import speak
from motet_pipelines.voice.voice import reply
from motet_shared.errors import ContextTooLong
from motet_shared.messages import Audio, Chat, Sampling, Speak, ToolCallDelta, Usage
from motet_shared.wire.epochs import Epoch

from .channel import Channel
from .conversation import without_oldest
from .outputs import Outputs
from .pictures import shown
from .session_settings import SessionSettings


@dataclass(slots=True)
class Ending:
    """How a response ended, as `response.done` reports it."""

    status: str  # completed | incomplete | cancelled | failed
    details: dict[str, Any] | None = None

    @property
    def item_status(self) -> str:
        return "completed" if self.status == "completed" else "incomplete"


def _ended(status: str, reason: str) -> Ending:
    return Ending(status, {"type": status, "reason": reason})


class Response:
    """Run one response in a task of its own; `cancel` ends it early with all its closing events."""

    def __init__(
        self,
        service: GatewayContext,
        channel: Channel,
        outputs: Outputs,
        settings: SessionSettings,
        messages: Callable[[], Awaitable[list[dict[str, Any]]]],
        head: dict[str, Any],
        epoch: Epoch,
        voice: str,
        ticket: Ticket,
        tenant: Tenant,
    ):
        self._service = service
        self._channel = channel
        self._outputs = outputs
        self._settings = settings
        self._messages = messages
        self._head = head  # id, conversation_id, metadata
        self._epoch = epoch
        self._voice = voice  # the text-to-speech model
        self._ticket, self._tenant = ticket, tenant
        self._outcome, self._speech = Outcome(), speak.Outcome()
        self._sounding_since: float | None = (
            None  # the channel's present seconds at the first audio
        )
        self._cancelling = False
        self._reason = ""
        self._running = False
        self.task: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return str(self._head["id"])

    @property
    def sounding_ms(self) -> float:
        """Return for how many more ms a client that plays what it received hears the reply.

        0 if the reply was cancelled: its client stops playing.
        """
        if self._sounding_since is None or self._reason:
            return 0.0
        whole = self._speech.samples / speak.RATE
        return max(0.0, whole - (self._channel.present_seconds - self._sounding_since)) * 1000

    def cancel(self, reason: str = "client_cancelled") -> None:
        """Cancel the response for `reason`; a second call, or one after the end, does nothing."""
        if not self._cancelling:
            self._cancelling, self._reason = True, reason
            if (
                self._running and self.task is not None
            ):  # else it has not begun and will check the flag
                self.task.cancel()

    async def run(self) -> None:
        """Run the response, from `response.created` to `rate_limits.updated`."""
        await self._channel.send(
            self._channel.event("response.created", response=self._shape(Ending("in_progress")))
        )
        self._running = True  # from here on `cancel` interrupts; before, it sets a flag
        ending = _ended("cancelled", self._reason)
        try:
            if not self._cancelling:
                ending = await self._generate()
        except asyncio.CancelledError:
            if not self._cancelling:
                raise
            _uncancel()
            ending = _ended("cancelled", self._reason)
        except ClientGone:
            raise
        except Exception as error:
            problem = Problem.of(error)
            details = {"type": problem.type, "code": problem.code, "message": problem.message}
            ending = Ending("failed", {"type": "failed", "error": details})
        self._running, self._cancelling = False, True
        self._ticket.settle()
        events: list[bytes] = []
        self._outputs.finish(ending.item_status, events)
        events.append(self._channel.event("response.done", response=self._shape(ending)))
        events.append(
            self._channel.event("rate_limits.updated", rate_limits=self._tenant.as_rate_limits())
        )
        await self._channel.send(*events)

    async def _generate(self) -> Ending:
        """Generate the reply.

        On ContextTooLong it retries without the oldest turns, if the session allows that.
        """
        messages, dropped = await self._messages(), 0
        while True:
            try:
                return await self._stream(messages)
            except ContextTooLong:
                dropped = dropped * 2 or 1
                shorter = without_oldest(messages, dropped)
                if (
                    self._settings.truncation == "disabled"
                    or shorter is None
                    or not self._outputs.empty
                ):
                    raise
                messages = shorter

    async def _stream(self, messages: list[dict[str, Any]]) -> Ending:
        plain, pictures = await shown(messages, self._service.config)
        async with await leased_images(self._service, pictures) as images:
            request = msgspec.structs.replace(self._request(plain), images=images)
            meter = ReplyMeter(self._ticket, prompt_tokens(request))
            with self._service.metrics.begin(request.model, self._outcome, meter) as track:
                await (
                    self._speak(request, track)
                    if self._settings.speaks
                    else self._write(request, track)
                )
        status = self._outcome.end.status if self._outcome.end is not None else "stop"
        return (
            _ended("incomplete", "max_output_tokens") if status == "length" else Ending("completed")
        )

    async def _write(self, request: Chat, track: Track) -> None:
        batches = chat(self._service.bus, request, self._outcome, **self._options())
        async with aclosing(batches):
            async for batch in batches:
                track.got(batch)
                events: list[bytes] = []
                for item in batch:
                    if item.text:
                        self._outputs.text(item.text, events)
                    for piece in item.tools or ():
                        self._outputs.tool(piece, events)
                if events:
                    await self._channel.send(*events)

    async def _speak(self, request: Chat, track: Track) -> None:
        """Speak the text while it is generated; tool calls follow when all is spoken."""
        audio = self._settings.audio
        say = Speak(
            model=self._voice,
            text="",
            voice=audio.voice or "",
            speed=audio.speed,
            seed=random_seed(),
        )
        calls: list[ToolCallDelta] = []
        spoken = SpeechMeter(self._ticket.audio)
        batches = reply(
            self._service.bus, request, say, self._outcome, self._speech, **self._options()
        )
        async with aclosing(batches):
            async for batch in batches:
                events: list[bytes] = []
                if isinstance(batch[0], Audio):
                    spoken.got(sum(len(item.data) for item in batch))
                    self._outputs.sound(batch, events)
                    self._sounding_since = self._sounding_since or self._channel.present_seconds
                else:
                    track.got(batch)
                    for item in batch:
                        if item.text:
                            self._outputs.write(item.text, events)
                        calls += item.tools or ()
                if events:
                    await self._channel.send(*events)
        events = []
        for piece in calls:
            self._outputs.tool(piece, events)
        if events:
            await self._channel.send(*events)

    def _options(self) -> dict[str, Any]:
        config = self._service.config
        return {
            "deadline": config.request_timeout,
            "patience": config.patience,
            "epoch": self._epoch,
        }

    def _request(self, messages: list[dict[str, Any]]) -> Chat:
        settings, rights = self._settings, self._tenant.rights
        limit = None if settings.max_output_tokens == "inf" else settings.max_output_tokens
        tools = settings.wire_tools()
        sampling = Sampling(temperature=settings.temperature, seed=random_seed())
        return Chat(
            model=settings.model,
            messages=messages,
            sampling=sampling
            if limit is None
            else msgspec.structs.replace(sampling, max_tokens=limit),
            tools=tools,
            tool_choice=settings.tool_choice.kind
            if tools or settings.tool_choice.kind == "required"
            else "none",
            tool=settings.tool_choice.tool,
            max_tokens=limit,
            request_id=self.id,
            priority=rights.priority(None),
            tenant=rights.share(""),
            max_context=rights.max_context,
        )

    def _shape(self, ending: Ending) -> dict[str, Any]:
        end = self._outcome.end
        return {
            "object": "realtime.response",
            **self._head,
            "status": ending.status,
            "status_details": ending.details,
            "output": self._outputs.items,
            "output_modalities": self._settings.modalities,
            "audio": {"output": self._settings.audio.as_output()},
            "max_output_tokens": self._settings.max_output_tokens,
            "usage": _usage(end.usage, self._speech.usage)
            if end is not None and end.usage is not None
            else None,
        }


def _uncancel() -> None:
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()


def _usage(usage: Usage, speech: Usage) -> dict[str, Any]:
    sounds = speech.completion_tokens
    cached = {"text_tokens": usage.cached_tokens, "audio_tokens": 0, "image_tokens": 0}
    return {
        "total_tokens": usage.prompt_tokens + usage.completion_tokens + sounds,
        "input_tokens": usage.prompt_tokens,
        "output_tokens": usage.completion_tokens + sounds,
        "input_token_details": {
            "text_tokens": usage.prompt_tokens,
            "audio_tokens": 0,
            "image_tokens": 0,
            "cached_tokens": usage.cached_tokens,
            "cached_tokens_details": cached,
        },
        "output_token_details": {"text_tokens": usage.completion_tokens, "audio_tokens": sounds},
    }
