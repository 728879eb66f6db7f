"""Describe the answers of the operators' endpoints as structs, for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from motet_doctor import Finding

from .answers import Count


class Live(Struct):
    status: Literal["live"]


class Version(Struct):
    version: str


class SpeechInput(Struct):
    """Report roles that spoken conversations lack, and whether the model gets the user's sound."""

    missing: list[str]
    hears: bool


class ImageInput(Struct):
    """Report missing services for image inputs, and the models that cannot read images meanwhile."""

    missing: list[str]
    models: list[str]


class Health(Struct):
    """Health of the server; `missing` lists why it is unavailable."""

    status: Literal["ready", "unavailable"]
    models: list[str]
    speech: SpeechInput
    images: ImageInput
    missing: list[str] = []


class Percentiles(Struct):
    p50: float
    p95: float
    p99: float


class RecentReplies(Struct):
    active: Count
    window_seconds: float
    replies: Count
    failed: Count
    replies_per_second: float
    tokens_per_second: float
    first_token_seconds: Percentiles | None
    between_tokens_seconds: Percentiles | None
    good: Annotated[float, Meta(ge=0, le=1)] | None


class Work(Struct):
    """Work that an instance has `done` since its start; `unit` is that of the work per second."""

    done: float
    unit: str


class Instance(Struct):
    role: str
    instance: str
    state: str
    host: str
    site: str
    pid: int
    models: list[str]
    load: dict[str, float]
    work: Work | None


class Stack(Struct):
    time: float
    instances: list[Instance]
    replies: RecentReplies


class Span(Struct):
    """Time of a service or of one of its stages (`<role>` or `<role>.<stage>`), in seconds.

    `start` is since the request came in; `seconds` is the duration.
    """

    name: str
    start: float
    seconds: float


class Diagnosis(Struct):
    """Findings in order of cost, the most expensive first; none if the stack is healthy."""

    time: float
    window_seconds: float
    findings: list[Finding]


class ReplyReport(Struct):
    """Sizes and times in seconds of one reply.

    `timing` is by `<role>.<stage>`; `spans` is the same as a waterfall.
    """

    ended: float
    request: str
    model: str
    status: str
    prompt_tokens: Count
    cached_tokens: Count
    tokens: Count
    first: float | None
    total: float
    moves: Count
    timing: dict[str, float]
    between: float | None
    spans: list[Span]


class Replies(Struct):
    replies: list[ReplyReport]
