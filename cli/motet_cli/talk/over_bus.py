"""Converse over the bus of a stack: the conversation runs in this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace

from motet_cli.supervision.connection import NatsAccess
from motet_cli.supervision.stack_bus import bus_config, stack_bus
from motet_cli.talk.options import Options, TalkInput
from motet_pipelines.graphs.spoken import own_voices
from motet_pipelines.voice.conversation.converse import converse
from motet_pipelines.voice.conversation.events import Event
from motet_pipelines.voice.services import SpeechServices, model_of_conversation
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import BadRequest
from motet_shared.wire.discovery import Directory
from motet_shared.wire.instances import served

_ROLE = "gateway"  # the user that may call every service of a conversation
_FILES = 64 << 20  # bytes of audio for recognizers that read files


async def converse_over_bus(
    found: NatsAccess, inputs: AsyncIterator[TalkInput], options: Options
) -> AsyncGenerator[list[Event], None]:
    """Yield the events of a conversation, as `converse` does.

    Raises Unavailable if the stack lacks a service that a conversation needs, UnknownModel or
    BadRequest for a model or voice that it does not serve, ConfigError if NATS cannot be reached.
    """
    async with AsyncExitStack() as exits:
        bus = await exits.enter_async_context(stack_bus(found, _ROLE))
        model = await model_of_conversation(bus.directory, options.model)
        _check_voice(bus.directory, model, options.voice)
        store = await BlobStore.of(bus_config(found, _ROLE), bus, _FILES).start()
        exits.push_async_callback(store.close)

        async def files() -> BlobStore:
            return store

        speech = SpeechServices.find(bus.directory, model=model)
        options = replace(options, transcribes=bool(speech.transcription), hears=speech.hears)
        batches = converse(bus, files, inputs, options.settings(model))
        await exits.enter_async_context(aclosing(batches))
        async for batch in batches:
            yield batch


def _check_voice(directory: Directory, model: str, voice: str) -> None:
    """Raise BadRequest for a voice that what speaks for a chat model does not have."""
    speech = SpeechServices.find(directory, model=model).speech
    card = own_voices(directory, model) or served(directory, "tts")[speech]
    if voice and voice not in card.voices:
        raise BadRequest(
            f"voice: {voice!r} is unknown; choose one of {', '.join(card.voices)}", param="voice"
        )
