"""List the formats of tool calls, and find that of a model."""

from __future__ import annotations

from .deepseek import DEEPSEEK_V3, DEEPSEEK_V31
from .glm4 import GLM4
from .harmony import HARMONY
from .hermes import HERMES
from .kimi_k2 import KIMI_K2
from .list_calls import GRANITE, PHI4
from .llama3 import LLAMA3
from .minimax import MINIMAX
from .mistral import MISTRAL, MISTRAL_V11
from .pythonic import PYTHONIC
from .qwen3_coder import QWEN3_CODER
from .tool_format import ToolFormat

# A model's format is the first one whose markers are in its chat template, so one whose markers
# include another's stands before it.
FORMATS = (
    QWEN3_CODER,
    GLM4,
    HERMES,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    MISTRAL_V11,
    MISTRAL,
    KIMI_K2,
    MINIMAX,
    PHI4,
    GRANITE,
    PYTHONIC,
    LLAMA3,
    HARMONY,
)
NAMES = tuple(tool_format.name for tool_format in FORMATS)
TAGS = frozenset(tag for tool_format in FORMATS for tag in tool_format.tags)


def find_format(name: str) -> ToolFormat:
    """Return the format of this name, one of `NAMES`."""
    return next(tool_format for tool_format in FORMATS if tool_format.name == name)


def detect_format(template: str) -> ToolFormat | None:
    """Return the format that a chat template writes; None if it has no format's markers."""
    for tool_format in FORMATS:
        if all(marker in template for marker in tool_format.markers):
            return tool_format
    return None
