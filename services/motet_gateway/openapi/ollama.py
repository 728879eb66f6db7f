"""Describe the answers of /api/… as structs, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from .answers import ChosenToken, Count


class OllamaEnd(Struct, omit_defaults=True, kw_only=True):
    """The last object of a reply; durations are nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"]
    total_duration: Count = 0
    load_duration: Count = 0
    prompt_eval_count: Count = 0
    prompt_eval_duration: Count = 0
    eval_count: Count = 0
    eval_duration: Count = 0
    logprobs: list[ChosenToken] = []


class CalledOllamaFunction(Struct):
    index: Count
    name: str
    arguments: Any


class CalledOllamaTool(Struct):
    id: str
    function: CalledOllamaFunction


class OllamaMessage(Struct, omit_defaults=True):
    role: Literal["assistant"]
    content: str
    thinking: str = ""
    tool_calls: list[CalledOllamaTool] = []


class OllamaChat(OllamaEnd, kw_only=True):
    message: OllamaMessage


class OllamaGeneration(OllamaEnd, kw_only=True):
    response: str
    thinking: str = ""
    tool_calls: list[CalledOllamaTool] = []


class OllamaEmbeddings(Struct):
    model: str
    embeddings: list[list[float]]
    total_duration: Count
    load_duration: Count
    prompt_eval_count: Count


class OllamaEmbedding(Struct):
    embedding: list[float]


class OllamaDetails(Struct):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Struct):
    name: str
    model: str
    modified_at: str
    size: Count
    digest: str
    details: OllamaDetails
    capabilities: list[str]


class OllamaModels(Struct):
    models: list[OllamaModel]


class RunningOllamaModel(Struct):
    """A model in memory; `expires_at`: when it is unloaded if no request comes."""

    name: str
    model: str
    size: Count
    digest: str
    details: OllamaDetails
    capabilities: list[str]
    expires_at: str
    size_vram: Count
    context_length: Count


class RunningOllamaModels(Struct):
    models: list[RunningOllamaModel]


class ShownOllamaModel(Struct):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class PullStatus(Struct, omit_defaults=True):
    """The state of a download, in bytes."""

    status: str
    digest: str = ""
    completed: Count = 0
    total: Count = 0
