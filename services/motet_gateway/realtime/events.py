"""What a client may say on the socket: one struct per event, and the items inside them.

Unknown fields are refused by name, as everywhere in the gateway. What the server says is rendered in `channel.py`
and `outputs.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import UNSET, Meta, UnsetType

from motet_shared.errors import BadRequest, UnsupportedParameter

from ..decoding import Decoder
from ..fields import Metadata, Name, Strict
from .audio_settings import AudioPatch, Format, Speech
from .formats import decode as decode_audio

ItemId = Annotated[str, Meta(min_length=1, max_length=64)]
MaxTokens = Annotated[int, Meta(ge=1)] | Literal["inf"] | None
Temperature = Annotated[float, Meta(ge=0, le=2)]


# --------------------------------------------------------------------------------------------------------- items
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
    """Only in `response.create`: an item of the conversation."""

    id: ItemId


Item = MessageItem | FunctionCallItem | FunctionCallOutputItem

_TEXT_TYPE = {"system": "input_text", "user": "input_text", "assistant": "output_text"}
_AUDIO_TYPE = {"user": "input_audio", "assistant": "output_audio"}
_IMAGES_MISSING = "images need the vision service, which this server does not run"


def check_item(item: Item, where: str, speech: Speech) -> None:
    """UnsupportedParameter for media that no service reads; BadRequest for parts that do not fit the role."""
    if not isinstance(item, MessageItem):
        return
    for index, part in enumerate(item.content):
        param = f"{where}.content[{index}]"
        if part.type == "input_image":
            raise UnsupportedParameter(f"`{param}`: {part.type}: {_IMAGES_MISSING}", param=param)
        if part.type in _AUDIO_TYPE.values():
            _check_audio(part, item.role, param, speech)
            continue
        expected = _TEXT_TYPE[item.role]
        if part.type != expected:
            message = f"`{param}.type` is {part.type!r}; a {item.role} message takes {expected!r}"
            raise BadRequest(message, param=f"{param}.type")
        if part.text is None:
            raise BadRequest(f"`{param}.text` is required", param=f"{param}.text")


def sounds(item: Item, format: Format) -> dict[int, bytes]:
    """PCM of the spoken parts of a client's item whose words it does not tell, by index."""
    if not isinstance(item, MessageItem):
        return {}
    silent = [(index, part.audio) for index, part in enumerate(item.content) if part.transcript is None]
    return {index: decode_audio(audio, format) for index, audio in silent if audio is not None}


def _check_audio(part: ContentPart, role: str, param: str, speech: Speech) -> None:
    speech.need(param, ears=True)
    if part.type != _AUDIO_TYPE.get(role):
        raise BadRequest(f"`{param}.type` is {part.type!r}, which a {role} message cannot have", param=f"{param}.type")
    if part.transcript is None and (part.audio is None or part.type == "output_audio"):
        given = "transcript" if part.type == "output_audio" else "audio"
        raise BadRequest(f"`{param}.{given}` is required", param=f"{param}.{given}")


# ------------------------------------------------------------------------------------------------- configuration
class RealtimeTool(Strict):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Common(Strict):
    """What a session sets and a response may override. UNSET: not mentioned; None, where nothing else is said: too."""

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


class SessionPatch(Common, kw_only=True):
    type: Literal["realtime", "transcription"] | UnsetType = UNSET
    model: str | UnsetType = UNSET
    truncation: Any = UNSET
    tracing: Any = UNSET
    include: Any = UNSET


class ResponsePatch(Common, kw_only=True):
    conversation: Literal["auto", "none"] | UnsetType | None = UNSET
    input: list[MessageItem | FunctionCallItem | FunctionCallOutputItem | ItemReference] | UnsetType | None = UNSET
    metadata: Metadata | UnsetType | None = UNSET


# ------------------------------------------------------------------------------------------------- client events
class ClientEvent(Strict):
    event_id: Annotated[str, Meta(max_length=512)] | None = None


class SessionUpdate(ClientEvent, tag="session.update", kw_only=True):
    session: SessionPatch


class ItemCreate(ClientEvent, tag="conversation.item.create", kw_only=True):
    item: Item
    previous_item_id: ItemId | None = None


class ItemRetrieve(ClientEvent, tag="conversation.item.retrieve", kw_only=True):
    item_id: ItemId


class ItemDelete(ClientEvent, tag="conversation.item.delete", kw_only=True):
    item_id: ItemId


class ItemTruncate(ClientEvent, tag="conversation.item.truncate", kw_only=True):
    item_id: ItemId
    content_index: int
    audio_end_ms: Annotated[int, Meta(ge=0)]


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
    | OutputClear
)

_decoder: Decoder[ClientEvent] = Decoder(cast(type[ClientEvent], Event))
decode = _decoder.decode


class _Id(msgspec.Struct):
    event_id: str | None = None


def event_id(text: str) -> str | None:
    """The id of an event that could not be decoded, so that its error can name it."""
    try:
        return msgspec.json.decode(text, type=_Id).event_id
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
