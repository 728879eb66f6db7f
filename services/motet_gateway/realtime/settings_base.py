"""Define the base of settings that a session keeps as the client sent them."""

from __future__ import annotations

from typing import Any

from msgspec import Struct


class StrictSettings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Refuse unknown fields by name."""


def wire(value: StrictSettings | None) -> dict[str, Any] | None:
    """Return a setting as clients read it, defaults included."""
    if value is None:
        return None
    fields = {name: getattr(value, name) for name in value.__struct_fields__}
    tag = value.__struct_config__.tag
    return {"type": tag, **fields} if tag else fields
