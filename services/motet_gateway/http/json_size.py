"""Bound the values of a JSON text before it is decoded.

Decoding runs on the event loop. Its time depends on the number of values rather than on bytes: 32
MiB of base64 take milliseconds, 32 MiB of empty arrays seconds.
"""

from __future__ import annotations

from motet_gateway.tenancy.tenant import Tenant
from motet_shared.errors import BadRequest

MAX_GROUPS = 1 << 15  # arrays and objects: about 1 µs each to decode and to measure
MAX_ENTRIES = 1 << 17  # commas: about 0.5 µs each
MAX_IDS = 1 << 20  # commas where the values are token ids: about 0.1 µs each
_MAX_COMMAS = 1 << 22  # those in strings included: more are not searched
_CHARGED = 8192  # tokens, at most, for a text that was searched and refused


class TooManyValues(BadRequest):
    """Refuse a JSON text that would hold the event loop while it is decoded."""

    code = "too_many_values"


def check_json(
    text: bytes | str, tenant: Tenant, param: str | None = None, entries: int = MAX_ENTRIES
) -> None:
    """Raise TooManyValues, and charge the tenant, if `text` has too many values.

    entries: most commas outside of strings. Text that is no JSON is judged as far as it is JSON,
    which is as far as it will be decoded.
    """
    if len(text) <= MAX_GROUPS or _fits(text, entries):
        return
    if isinstance(text, str):
        text = text.encode(errors="replace")
    plain = _outside_strings(text)
    if plain is not None and _fits(plain, entries):
        return
    tenant.charge_refusal(min(len(text) // 4, _CHARGED))
    raise TooManyValues(
        f"the JSON has more than {entries} values, or more than {MAX_GROUPS} arrays and objects; "
        "send fewer at a time",
        param=param,
    )


def _fits(text: bytes | str, entries: int) -> bool:
    groups, commas = _count(text, "[") + _count(text, "{"), _count(text, ",")
    if groups > MAX_GROUPS or commas > entries:
        return False
    # Beyond MAX_ENTRIES there are numbers only: strings and keys cost more.
    return commas <= MAX_ENTRIES or _count(text, '"') <= 2 * MAX_ENTRIES


def _count(text: bytes | str, mark: str) -> int:
    return text.count(mark) if isinstance(text, str) else text.count(mark.encode())


def _outside_strings(text: bytes) -> bytes | None:
    """Return `text` with a quotation mark for each string, or None if it has too many."""
    if _count(text, ",") > _MAX_COMMAS:
        return None
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    if _count(text, '"') > 4 * (MAX_ENTRIES + MAX_GROUPS):  # a key and a value for each comma
        return None
    return b'"'.join(text.split(b'"')[::2])
