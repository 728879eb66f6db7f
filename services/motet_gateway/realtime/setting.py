"""What a session keeps as the client sent it."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class Setting(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of such settings; unknown fields are refused by name."""


def wire(value: Setting | None) -> dict[str, Any] | None:
    """A setting as clients read it, defaults included."""
    if value is None:
        return None
    fields = {name: getattr(value, name) for name in value.__struct_fields__}
    tag = value.__struct_config__.tag
    return {"type": tag, **fields} if tag else fields
