"""How JSON stands in a grammar (`messages.Grammar`): those who write one, and who compiles it, agree on it here."""

from __future__ import annotations

import json
from typing import Any

# Between the parts: as `json.dumps` has it, packed or indented, and not without end.
WHITESPACE = r" |\n[ \t]{0,64}"


def json_rule(schema: dict[str, Any], *, lenient: bool = False) -> str:
    """The part of a rule that stands for JSON which satisfies `schema`, in llguidance's variant of Lark's syntax.

    lenient: keywords that nothing can be held to are ignored; otherwise they are refused when it is compiled.
    """
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": lenient}})
