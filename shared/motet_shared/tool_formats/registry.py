"""List the formats of tool calls, and find that of a model."""

from __future__ import annotations

from .hermes import HERMES
from .tool_format import ToolFormat

# A model's format is the first one whose markers are in its chat template, so one whose markers
# include another's stands before it.
FORMATS = (HERMES,)
DEFAULT = HERMES
NAMES = tuple(tool_format.name for tool_format in FORMATS)
TAGS = frozenset(tag for tool_format in FORMATS for tag in tool_format.tags)


def find_format(name: str) -> ToolFormat:
    """Return the format of this name, one of `NAMES`."""
    return next(tool_format for tool_format in FORMATS if tool_format.name == name)


def detect_format(template: str) -> ToolFormat:
    """Return the format that a chat template writes; `DEFAULT` if it has no format's markers."""
    for tool_format in FORMATS:
        if all(marker in template for marker in tool_format.markers):
            return tool_format
    return DEFAULT
