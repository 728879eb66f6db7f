"""List the formats of reasoning, and find that of a model."""

from __future__ import annotations

from motet_shared.tool_formats import kimi_k2

from .harmony import HARMONY
from .reasoning_format import ReasoningFormat
from .think_tags import ThinkTags

THINK = ThinkTags(name="think", markers=("</think>",), opening="<think>", closing="</think>")
MISTRAL = ThinkTags(
    name="mistral",
    markers=("[THINK]", "[/THINK]"),
    opening="[THINK]",
    closing="[/THINK]",
    repeats=True,
    parts=True,
)
GRANITE = ThinkTags(
    name="granite",
    markers=("<think>", "<response>"),
    opening="<think>",
    closing="</think>",
    answer=("<response>", "</response>"),
)
HUNYUAN = ThinkTags(
    name="hunyuan",
    markers=("<think>", "<answer>"),
    opening="<think>",
    closing="</think>",
    answer=("<answer>", "</answer>"),
)
KIMI_K2 = ThinkTags(
    name="kimi_k2",
    markers=("</think>", kimi_k2.OPENING),
    opening="<think>",
    closing="</think>",
    limits=(kimi_k2.OPENING,),
)
SEED_OSS = ThinkTags(
    name="seed_oss",
    markers=("<seed:think>",),
    opening="<seed:think>",
    closing="</seed:think>",
)

# A model's format is the first one whose markers are in its chat template, so one whose markers
# include another's stands before it.
FORMATS: tuple[ReasoningFormat, ...] = (
    HARMONY,
    MISTRAL,
    GRANITE,
    HUNYUAN,
    KIMI_K2,
    SEED_OSS,
    THINK,
)
NAMES = tuple(one.name for one in FORMATS)
TAGS = frozenset(tag for one in FORMATS for tag in one.tags)


def find_format(name: str) -> ReasoningFormat:
    """Return the format of this name, one of `NAMES`."""
    return next(one for one in FORMATS if one.name == name)


def detect_format(template: str) -> ReasoningFormat | None:
    """Return the format of a chat template; None if it has no format's markers."""
    for one in FORMATS:
        if all(marker in template for marker in one.markers):
            return one
    return None
