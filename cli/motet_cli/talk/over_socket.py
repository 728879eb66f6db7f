"""Converse over `/v1/realtime`: the conversation runs in the gateway of a server.

The same generator as over the bus, from a caller's point of view: inputs become events of OpenAI's
realtime protocol, and what a server sends becomes events of a conversation again.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any
from urllib.parse import urlencode

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from motet_cli.talk.options import Options, TalkInput
from motet_pipelines.voice.conversation import events
from motet_pipelines.voice.conversation.events import Event
from motet_pipelines.voice.conversation.inputs import AppendAudio
from motet_pipelines.voice.conversation.settings import ReplySettings
from motet_shared.errors import MotetError, Unavailable, from_wire

_SETTINGS = "settings"  # id of the event with the settings
_TRANSCRIPTION = "conversation.item.input_audio_transcription"


async def converse_over_socket(
    url: str, key: str | None, inputs: AsyncIterator[TalkInput], options: Options
) -> AsyncGenerator[list[Event], None]:
    """Yield the events of a conversation; it ends with the inputs, whatever is under way.

    Raises Unavailable if the server cannot be reached or leaves, MotetError for what it refuses.
    """
    async with await _connect(url, key, options.model) as socket:
        ended = asyncio.Event()
        sending = asyncio.create_task(_send_all(socket, inputs, options, ended), name="inputs")
        last: Event | None = None
        try:
            async for message in socket:
                sent = json.loads(message)
                last = render(sent, options.model)
                if isinstance(last, events.Failed) and sent["error"].get("event_id") == _SETTINGS:
                    raise last.error
                if last is not None:
                    yield [last]
        except ConnectionClosed as closed:
            raise _loss(last, f"the connection to {url} broke: {closed}") from None
        else:
            if not ended.is_set():
                raise _loss(last, f"{url} closed the connection")
            await sending
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


def _loss(last: Event | None, message: str) -> Exception:
    """Return why a server left: the error that it sent last, if it did."""
    return last.error if isinstance(last, events.Failed) else Unavailable(message)


async def _connect(url: str, key: str | None, model: str) -> ClientConnection:
    address = url.rstrip("/").replace("http", "ws", 1) + "/v1/realtime"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    query = urlencode({"model": model})
    try:
        return await connect(
            f"{address}?{query}", additional_headers=headers, proxy=None, max_size=None
        )
    except (OSError, InvalidHandshake, TimeoutError) as error:
        raise Unavailable(
            f"no server at {url} ({error}); start one with `motet up`, or give --url"
        ) from None


def _session(options: Options) -> dict[str, Any]:
    heard: dict[str, Any] = {"model_input": "audio"} if options.hears else {}
    if options.transcribes:
        heard["transcription"] = {"language": options.language} if options.language else {}
    output = {"voice": options.voice} if options.voice else {}
    return {
        "type": "realtime",
        "instructions": options.system,
        "temperature": options.temperature,
        "audio": {"input": heard, "output": output},
    }


async def _send_all(
    socket: ClientConnection,
    inputs: AsyncIterator[TalkInput],
    options: Options,
    ended: asyncio.Event,
) -> None:
    """Send the settings and the inputs; at their end, set `ended` and close the connection."""
    try:
        await _send(socket, "session.update", event_id=_SETTINGS, session=_session(options))
        async for given in inputs:
            if isinstance(given, AppendAudio):
                audio = base64.b64encode(given.pcm).decode()
                await _send(socket, "input_audio_buffer.append", audio=audio)
            else:
                await _send(
                    socket,
                    "conversation.item.truncate",
                    item_id=given.item_id,
                    content_index=0,
                    audio_end_ms=given.audio_ms,
                )
    except ConnectionClosed:
        return  # the receiving side reports it
    finally:
        ended.set()
        await socket.close()


async def _send(socket: ClientConnection, kind: str, **fields: Any) -> None:
    await socket.send(json.dumps({"type": kind, **fields}))


def render(sent: dict[str, Any], model: str) -> Event | None:
    """Return a server event as an event of the conversation; None if it has no counterpart here."""
    renderer = _RENDERERS.get(str(sent.get("type")))
    return None if renderer is None else renderer(sent, model)


def _started(sent: dict[str, Any], model: str) -> Event:
    return events.ReplyStarted(sent["response"]["id"], ReplySettings(model=model), True, None)


def _opened(sent: dict[str, Any], model: str) -> Event | None:
    item = sent["item"]
    if item.get("type") != "message":
        return None
    return events.OutputOpened(sent["response_id"], sent["output_index"], "speech", item, None)


def _speech(sent: dict[str, Any], model: str) -> Event:
    pcm = base64.b64decode(sent["delta"]) if sent["type"].endswith("audio.delta") else b""
    words = "" if pcm else sent["delta"]
    return events.SpeechDelta(sent["response_id"], sent["output_index"], pcm, words)


def _ended(sent: dict[str, Any], model: str) -> Event:
    response = sent["response"]
    details = response.get("status_details") or {}
    error = details.get("error")
    return events.ReplyEnded(
        reply_id=response["id"],
        status=response["status"],
        reason=details.get("reason") or "",
        error=None if error is None else _error(error),
        items=response["output"],
    )


def _error(error: dict[str, Any]) -> MotetError:
    return from_wire(str(error.get("code") or "internal"), str(error.get("message")))


_RENDERERS: dict[str, Callable[[dict[str, Any], str], Event | None]] = {
    "input_audio_buffer.speech_started": lambda sent, _: events.SpeechStarted(
        sent["item_id"], sent["audio_start_ms"]
    ),
    "input_audio_buffer.speech_stopped": lambda sent, _: events.SpeechStopped(
        sent["item_id"], sent["audio_end_ms"]
    ),
    f"{_TRANSCRIPTION}.delta": lambda sent, _: events.TranscriptDelta(
        sent["item_id"], sent["content_index"], sent["delta"]
    ),
    f"{_TRANSCRIPTION}.completed": lambda sent, _: events.TranscriptCompleted(
        sent["item_id"], sent["content_index"], sent["transcript"], sent["usage"]["seconds"]
    ),
    f"{_TRANSCRIPTION}.failed": lambda sent, _: events.TranscriptFailed(
        sent["item_id"], sent["content_index"], _error(sent["error"])
    ),
    "response.created": _started,
    "response.output_item.added": _opened,
    "response.output_audio.delta": _speech,
    "response.output_audio_transcript.delta": _speech,
    "response.done": _ended,
    "error": lambda sent, _: events.Failed(_error(sent["error"])),
}
