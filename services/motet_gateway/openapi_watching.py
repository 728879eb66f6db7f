"""What the endpoints for operators answer, as structs: for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from motet_shared.doctor import Finding

from .openapi_answers import Count


class Live(Struct):
    status: Literal["live"]


class Lacking(Struct):
    missing: list[str]


class LackingEyes(Struct):
    """`models`: those that see, but can be shown nothing now."""

    missing: list[str]
    models: list[str]


class Health(Struct):
    """`missing`: why it is unavailable."""

    status: Literal["ready", "unavailable"]
    models: list[str]
    speech: Lacking
    images: LackingEyes
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
    """`done`: since the instance began; `unit`: of as much per second."""

    done: float
    unit: str


class Instance(Struct):
    role: str
    instance: str
    state: str
    host: str
    pid: int
    models: list[str]
    load: dict[str, float]
    work: Work | None


class Stack(Struct):
    time: float
    instances: list[Instance]
    replies: RecentReplies


class Span(Struct):
    """A service or a stage of one, `<role>` or `<role>.<stage>`: seconds since the request came in, and its own."""

    name: str
    start: float
    seconds: float


class Diagnosis(Struct):
    """`findings`: those that cost most first; none: healthy."""

    time: float
    window_seconds: float
    findings: list[Finding]


class ReplyReport(Struct):
    """Sizes and seconds of one reply; `timing` by `<role>.<stage>`, `spans` as a waterfall of it."""

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
