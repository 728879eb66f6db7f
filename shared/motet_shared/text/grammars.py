"""Define how JSON is embedded in a grammar (`messages.Grammar`), for its writers and compiler."""

from __future__ import annotations

import json
from typing import Any

LONGEST = 256 * 1024  # characters of a grammar, which bounds how long it takes to compile

# Whitespace of JSON: a space at most behind `,` and `:`, and none elsewhere, so that no model can pad a
# reply to its limit. As a pattern of whitespace, llguidance before 1.8 would repeat it without a bound.
WHITESPACE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


def json_rule(schema: dict[str, Any], *, lenient: bool = False) -> str:
    """Return a rule for JSON that satisfies `schema`, in llguidance's variant of Lark's syntax.

    lenient: unsupported keywords are ignored; otherwise they are refused on compilation.
    """
    return "%json " + guided_schema(schema, lenient=lenient)


def guided_schema(schema: dict[str, Any], *, lenient: bool = False) -> str:
    """Return the text of a schema that allows little whitespace, which a model might repeat endlessly."""
    options = {**WHITESPACE, "lenient": lenient}
    return json.dumps({**schema, "x-guidance": options})
