"""Write the output items of a response: each begins, grows and ends, and emits that as events."""

from __future__ import annotations

from typing import Any, Protocol

from motet_gateway.openai.logprobs import chat_logprobs
from motet_gateway.responses.reasoning import encoded
from motet_shared.messages import TextLogprob

from .custom_input import CustomInput
from .events import Deltas


class Response(Protocol):
    """The response that an item belongs to."""

    items: list[dict[str, Any]]
    encrypted: bool

    def emit(self, kind: str, **fields: Any) -> None:
        """Add an event."""

    def deltas(self, kind: str, **fields: Any) -> Deltas | None:
        """Return a renderer of deltas, or None if events are not rendered."""

    def next_id(self, kind: str) -> str:
        """Return the id of the next item."""


class OpenItem:
    """An item that is being written."""

    kind = ""

    def __init__(self, output: Response):
        self.output = output
        self.id = output.next_id(self.kind)
        self.index = len(output.items)

    def shape(self, status: str) -> dict[str, Any]:
        """Return the item as it is now."""
        raise NotImplementedError

    def begin(self) -> None:
        item = self.shape("in_progress")
        self.output.emit("response.output_item.added", output_index=self.index, item=item)

    def close(self, status: str) -> None:
        item = self.shape(status)
        self.output.items.append(item)
        self.output.emit("response.output_item.done", output_index=self.index, item=item)

    @property
    def where(self) -> dict[str, Any]:
        """Return the fields with which events name this item."""
        return {"item_id": self.id, "output_index": self.index}


class OpenMessage(OpenItem):
    kind = "message"

    def __init__(self, output: Response):
        super().__init__(output)
        self._texts: list[str] = []
        self._logprobs: list[dict[str, Any]] = []
        self._part = {**self.where, "content_index": 0}
        self._deltas = output.deltas("response.output_text.delta", **self._part, logprobs=[])

    def begin(self) -> None:
        item = {**self._base("in_progress"), "content": []}
        self.output.emit("response.output_item.added", output_index=self.index, item=item)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.output.emit("response.content_part.added", **self._part, part=part)

    def text(self, text: str, logprobs: list[TextLogprob]) -> None:
        self._texts.append(text)
        if not logprobs and self._deltas is not None:
            self._deltas.add(text)
            return
        found = chat_logprobs(logprobs)["content"]
        self._logprobs += found
        kind = "response.output_text.delta"
        self.output.emit(kind, **self._part, delta=text, logprobs=found)

    def close(self, status: str) -> None:
        part = self._content()
        done = {"text": part["text"], "logprobs": part["logprobs"]}
        self.output.emit("response.output_text.done", **self._part, **done)
        self.output.emit("response.content_part.done", **self._part, part=part)
        super().close(status)

    def shape(self, status: str) -> dict[str, Any]:
        return {**self._base(status), "content": [self._content()]}

    def _base(self, status: str) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "status": status, "role": "assistant"}

    def _content(self) -> dict[str, Any]:
        text = "".join(self._texts)
        fields = {"annotations": [], "logprobs": self._logprobs}
        return {"type": "output_text", "text": text, **fields}


class OpenReasoning(OpenItem):
    kind = "reasoning"

    def __init__(self, output: Response):
        super().__init__(output)
        self._texts: list[str] = []
        self._part = {**self.where, "content_index": 0}
        self._deltas = output.deltas("response.reasoning_text.delta", **self._part)

    def begin(self) -> None:
        item = {**self._base("in_progress"), "content": []}
        self.output.emit("response.output_item.added", output_index=self.index, item=item)
        part = {"type": "reasoning_text", "text": ""}
        self.output.emit("response.content_part.added", **self._part, part=part)

    def text(self, text: str) -> None:
        self._texts.append(text)
        if self._deltas is not None:
            self._deltas.add(text)

    def close(self, status: str) -> None:
        part = {"type": "reasoning_text", "text": "".join(self._texts)}
        self.output.emit("response.reasoning_text.done", **self._part, text=part["text"])
        self.output.emit("response.content_part.done", **self._part, part=part)
        super().close(status)

    def shape(self, status: str) -> dict[str, Any]:
        text = "".join(self._texts)
        item = {**self._base(status), "content": [{"type": "reasoning_text", "text": text}]}
        if self.output.encrypted:
            item["encrypted_content"] = encoded(text)
        return item

    def _base(self, status: str) -> dict[str, Any]:
        return {"id": self.id, "type": "reasoning", "status": status, "summary": []}


class OpenCall(OpenItem):
    kind = "function_call"

    def __init__(self, output: Response, call_id: str, name: str):
        super().__init__(output)
        self._call_id, self._name = call_id, name
        self._arguments: list[str] = []
        self._deltas = output.deltas("response.function_call_arguments.delta", **self.where)

    def arguments(self, piece: str) -> None:
        self._arguments.append(piece)
        if self._deltas is not None:
            self._deltas.add(piece)

    def close(self, status: str) -> None:
        done = {"arguments": "".join(self._arguments), "name": self._name}
        self.output.emit("response.function_call_arguments.done", **self.where, **done)
        super().close(status)

    def shape(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._arguments),
        }


class OpenCustomCall(OpenItem):
    kind = "custom_tool_call"

    def __init__(self, output: Response, call_id: str, name: str):
        super().__init__(output)
        self._call_id, self._name = call_id, name
        self._input = CustomInput()
        self._deltas = output.deltas("response.custom_tool_call_input.delta", **self.where)

    def arguments(self, piece: str) -> None:
        self._emit(self._input.feed(piece))

    def _emit(self, text: str) -> None:
        if text and self._deltas is not None:
            self._deltas.add(text)

    def close(self, status: str) -> None:
        self._emit(self._input.finish())
        done = {"input": self._input.text}
        self.output.emit("response.custom_tool_call_input.done", **self.where, **done)
        super().close(status)

    def shape(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "custom_tool_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "input": self._input.text,
        }


class OpenImage(OpenItem):
    """An image that is being drawn."""

    kind = "image_generation_call"

    def __init__(self, output: Response):
        super().__init__(output)
        self.fields: dict[str, Any] = {}
        self._partial = 0

    def begin(self) -> None:
        super().begin()
        for step in ("in_progress", "generating"):
            self.output.emit(f"response.image_generation_call.{step}", **self.where)

    def preview(self, fields: dict[str, Any]) -> None:
        """Emit an estimate of the image."""
        kind = "response.image_generation_call.partial_image"
        self.output.emit(kind, **self.where, partial_image_index=self._partial, **fields)
        self._partial += 1

    def close(self, status: str) -> None:
        if status == "completed":
            self.output.emit("response.image_generation_call.completed", **self.where)
        super().close(status)

    def shape(self, status: str) -> dict[str, Any]:
        if status == "incomplete":
            status = "failed"
        base = {"id": self.id, "type": "image_generation_call", "status": status, "result": None}
        return {**base, **self.fields}
