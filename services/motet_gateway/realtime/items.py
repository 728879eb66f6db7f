"""Convert the items of clients to those that a conversation keeps."""

from __future__ import annotations

from typing import Any

from motet_pipelines.voice.conversation.history import IMAGE, Item

from .events import ClientItem, ContentPart, FunctionCallItem, MessageItem


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
