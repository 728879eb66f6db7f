"""Define the client events of the socket, one struct per event, and the items inside them.

Unknown fields are refused by name unless the table of `hints.py` lists them, as everywhere in the
gateway. Server events are rendered in `channel.py` and `outputs.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import UNSET, Meta, UnsetType

from motet_gateway.http.decoding import Decoder
from motet_gateway.http.fields import Count, Int64, Metadata, Name, Positive, Ratio, Strict
from motet_pipelines.voice.conversation.history import IMAGE, Item
from motet_pipelines.voice.services import SpeechServices
from motet_shared.errors import BadRequest

from .audio_settings import AudioPatch, Format
from .formats import decode as decode_audio
from .video.settings import Video

ItemId = Annotated[str, Meta(min_length=1, max_length=64)]
MaxTokens = Positive | Literal["inf"] | None
Temperature = Annotated[float, Meta(ge=0, le=2)]


# -------------------------------------------------------------------------------------------- items
class ContentPart(Strict):
    type: str
    text: str | None = None
    audio: str | None = None
    transcript: str | None = None
    image_url: str | None = None
    detail: str | None = None


class MessageItem(Strict, tag="message"):
    role: Literal["system", "user", "assistant"]
    content: list[ContentPart]
    id: ItemId | None = None
    object: Literal["realtime.item"] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class FunctionCallItem(Strict, tag="function_call"):
    name: Name
    arguments: str
    call_id: ItemId | None = None
    id: ItemId | None = None
    object: Literal["realtime.item"] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class FunctionCallOutputItem(Strict, tag="function_call_output"):
    call_id: ItemId
    output: str
    id: ItemId | None = None
    object: Literal["realtime.item"] | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None


class ItemReference(Strict, tag="item_reference"):
    """Refer to an item of the conversation; only in `response.create`."""

    id: ItemId


ClientItem = MessageItem | FunctionCallItem | FunctionCallOutputItem

_TEXT_TYPE = {"system": "input_text", "user": "input_text", "assistant": "output_text"}
_AUDIO_TYPE = {"user": "input_audio", "assistant": "output_audio"}


def check_item(item: ClientItem, where: str, speech: SpeechServices) -> None:
    """Check the parts of a message.

    Raises UnsupportedParameter for media that no service reads and BadRequest for parts that do not
    fit the role.
    """
    if not isinstance(item, MessageItem):
        return
    for index, part in enumerate(item.content):
        param = f"{where}.content[{index}]"
        if part.type == IMAGE:
            continue  # `pictures.check_pictures`
        if part.type in _AUDIO_TYPE.values():
            _check_audio(part, item.role, param, speech)
            continue
        expected = _TEXT_TYPE[item.role]
        if part.type != expected:
            message = f"`{param}.type` is {part.type!r}; a {item.role} message takes {expected!r}"
            raise BadRequest(message, param=f"{param}.type")
        if part.text is None:
            raise BadRequest(f"`{param}.text` is required", param=f"{param}.text")


def sounds(item: ClientItem, format: Format) -> dict[int, bytes]:
    """Return the PCM of a client item's spoken parts that have no transcript, by part index."""
    if not isinstance(item, MessageItem):
        return {}
    silent = [
        (index, part.audio) for index, part in enumerate(item.content) if part.transcript is None
    ]
    return {index: decode_audio(audio, format) for index, audio in silent if audio is not None}


def stored(item: ClientItem, new_id: str, new_call_id: str) -> Item:
    """Return a client's item with ids filled in."""
    base = {"id": item.id or new_id, "object": "realtime.item", "type": "", "status": "completed"}
    if isinstance(item, MessageItem):
        content = [_stored_part(part) for part in item.content]
        return {**base, "type": "message", "role": item.role, "content": content}
    if isinstance(item, FunctionCallItem):
        call_id = item.call_id or new_call_id
        return {
            **base,
            "type": "function_call",
            "call_id": call_id,
            "name": item.name,
            "arguments": item.arguments,
        }
    return {**base, "type": "function_call_output", "call_id": item.call_id, "output": item.output}


def _stored_part(part: ContentPart) -> dict[str, Any]:
    """Return a part as it is kept: audio as its transcript alone, images with their URL."""
    if part.type == IMAGE:
        return {"type": part.type, "image_url": part.image_url, "detail": part.detail or "auto"}
    spoken = part.type in ("input_audio", "output_audio")
    return {
        "type": part.type,
        **({"transcript": part.transcript} if spoken else {"text": part.text}),
    }


def _check_audio(part: ContentPart, role: str, param: str, speech: SpeechServices) -> None:
    speech.need(param, listening=True)
    if part.type != _AUDIO_TYPE.get(role):
        raise BadRequest(
            f"`{param}.type` is {part.type!r}, which a {role} message cannot have",
            param=f"{param}.type",
        )
    if part.transcript is None and (part.audio is None or part.type == "output_audio"):
        given = "transcript" if part.type == "output_audio" else "audio"
        raise BadRequest(f"`{param}.{given}` is required", param=f"{param}.{given}")


# ------------------------------------------------------------------------------------ configuration
class RealtimeTool(Strict):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Common(Strict):
    """Settings of a session that a response may override.

    UNSET: the field is absent; None means the same where it has no meaning of its own.
    """

    instructions: str | UnsetType | None = UNSET
    output_modalities: list[Literal["text", "audio"]] | UnsetType | None = UNSET
    tools: list[RealtimeTool] | UnsetType | None = UNSET
    tool_choice: Any = UNSET
    max_output_tokens: MaxTokens | UnsetType = UNSET
    temperature: Temperature | UnsetType | None = UNSET  # extension
    parallel_tool_calls: Any = UNSET
    audio: AudioPatch | UnsetType | None = UNSET
    prompt: Any = UNSET
    reasoning: Any = UNSET


class TokenLimits(Strict):
    post_instructions: Positive | None = None


class RetentionRatio(Strict, tag="retention_ratio"):
    """Drop the oldest turns down to a share of the limit once a conversation exceeds it."""

    retention_ratio: Ratio
    token_limits: TokenLimits | None = None


Include = Literal["item.input_audio_transcription.logprobs"]
Truncation = Literal["auto", "disabled"] | RetentionRatio


class SessionPatch(Common, kw_only=True):
    type: Literal["realtime", "transcription"] | UnsetType = UNSET
    model: str | UnsetType = UNSET
    truncation: Truncation | UnsetType | None = UNSET
    tracing: Any = UNSET
    include: list[Include] | UnsetType | None = UNSET
    video: Video | UnsetType | None = UNSET  # extension


class ResponsePatch(Common, kw_only=True):
    conversation: Literal["auto", "none"] | UnsetType | None = UNSET
    input: (
        list[MessageItem | FunctionCallItem | FunctionCallOutputItem | ItemReference]
        | UnsetType
        | None
    ) = UNSET
    metadata: Metadata | UnsetType | None = UNSET


# ------------------------------------------------------------------------------------ client events
class ClientEvent(Strict):
    event_id: Annotated[str, Meta(max_length=512)] | None = None


class SessionUpdate(ClientEvent, tag="session.update", kw_only=True):
    session: SessionPatch


class ItemCreate(ClientEvent, tag="conversation.item.create", kw_only=True):
    item: ClientItem
    previous_item_id: ItemId | None = None


class ItemRetrieve(ClientEvent, tag="conversation.item.retrieve", kw_only=True):
    item_id: ItemId


class ItemDelete(ClientEvent, tag="conversation.item.delete", kw_only=True):
    item_id: ItemId


class ItemTruncate(ClientEvent, tag="conversation.item.truncate", kw_only=True):
    item_id: ItemId
    content_index: Int64
    audio_end_ms: Count


class ResponseCreate(ClientEvent, tag="response.create", kw_only=True):
    response: ResponsePatch | None = None


class ResponseCancel(ClientEvent, tag="response.cancel", kw_only=True):
    response_id: str | None = None


class AudioAppend(ClientEvent, tag="input_audio_buffer.append", kw_only=True):
    audio: str


class AudioCommit(ClientEvent, tag="input_audio_buffer.commit"):
    pass


class AudioClear(ClientEvent, tag="input_audio_buffer.clear"):
    pass


class ImageAppend(ClientEvent, tag="input_image_buffer.append", kw_only=True):
    """Add a frame of the user's camera; Qwen's Omni-Realtime API has this event, too."""

    image: str
    detail: Literal["auto", "low", "high"] | None = None


class OutputClear(ClientEvent, tag="output_audio_buffer.clear"):
    pass


Event = (
    SessionUpdate
    | ItemCreate
    | ItemRetrieve
    | ItemDelete
    | ItemTruncate
    | ResponseCreate
    | ResponseCancel
    | AudioAppend
    | AudioCommit
    | AudioClear
    | ImageAppend
    | OutputClear
)

_decoder: Decoder[ClientEvent] = Decoder(cast(type[ClientEvent], Event))
decode = _decoder.decode


class _Id(msgspec.Struct):
    event_id: str | None = None


def event_id(text: str) -> str | None:
    """Return the id of an event that could not be decoded, so that its error can name it."""
    try:
        return msgspec.json.decode(text, type=_Id).event_id
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
