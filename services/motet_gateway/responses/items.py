"""Define the items that a client sends and gets back: messages, tool calls, outputs, reasoning.

Output items of a response are valid input items, so that a client may send them back as they came.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from motet_gateway.http.fields import Name, Strict

Status = Literal["in_progress", "completed", "incomplete"]


# ------------------------------------------------------------------------------------------- parts
class InputText(Strict, tag="input_text"):
    text: str


class InputImage(Strict, tag="input_image"):
    """An image: a data URL, or with --remote-images one that is fetched."""

    image_url: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None
    file_id: None = None


class InputFile(Strict, tag="input_file"):
    """A text file: base64, a data URL of it, or the id of one of /v1/files."""

    file_data: str | None = None
    filename: Annotated[str, Meta(max_length=255)] | None = None
    detail: Literal["auto", "low", "high"] | None = None
    file_id: Annotated[str, Meta(max_length=255)] | None = None
    file_url: None = None


class OutputText(Strict, tag="output_text"):
    """Text of an earlier response; log-probabilities and annotations are not read again."""

    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Refusal(Strict, tag="refusal"):
    refusal: str


Part = InputText | InputImage | InputFile | OutputText | Refusal


# ------------------------------------------------------------------------------------------- items
class InputMessage(Strict, tag="message"):
    """A message; `type` may be left out."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class FunctionCallItem(Strict, tag="function_call"):
    call_id: str
    name: Name
    arguments: str
    id: str | None = None
    status: Status | None = None


class FunctionCallOutput(Strict, tag="function_call_output"):
    call_id: str
    output: str | list[Part]
    id: str | None = None
    status: Status | None = None


class CustomToolCallItem(Strict, tag="custom_tool_call"):
    call_id: str
    name: Name
    input: str
    id: str | None = None
    status: Status | None = None


class CustomToolCallOutput(Strict, tag="custom_tool_call_output"):
    call_id: str
    output: str | list[Part]
    id: str | None = None
    status: Status | None = None


class SummaryText(Strict, tag="summary_text"):
    text: str


class ReasoningText(Strict, tag="reasoning_text"):
    text: str


class ReasoningItem(Strict, tag="reasoning"):
    """Reasoning of an earlier response: its text, or `encrypted_content` where that is all."""

    summary: list[SummaryText] = field(default_factory=list)
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None
    id: str | None = None
    status: Status | None = None


class ImageCallItem(Strict, tag="image_generation_call"):
    """An image of an earlier response, in base64."""

    id: str
    result: str | None = None
    status: Literal["in_progress", "completed", "generating", "failed"] | None = None
    revised_prompt: str | None = None
    action: Literal["generate", "edit", "auto"] | None = None
    background: str | None = None
    output_format: str | None = None
    quality: str | None = None
    size: str | None = None


class ItemReference(Strict, tag="item_reference"):
    """An item of a stored response, by its id."""

    id: str


Item = (
    InputMessage
    | FunctionCallItem
    | FunctionCallOutput
    | CustomToolCallItem
    | CustomToolCallOutput
    | ReasoningItem
    | ImageCallItem
    | ItemReference
)
