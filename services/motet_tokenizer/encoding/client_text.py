"""Protect client text so that no template can turn it into a control token.

Each protected character c of a client's string passes through the template as its twin, the
private-use character U+100000 + c. Control tokens contain no twins, so however the template joins,
cuts or prints, a control token of original characters in the rendered text was written by the
template alone. `restore` turns twins back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

_PLANE = 0x100000
_TWINS = re.compile("[\U00100000-\U0010ffff]")
# Set by the schema, never by a client; some templates form control tokens from roles:
# '<|' + role + '|>'.
_ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
# Methods that templates call on strings: computed on plain text, results are protected again.
_WRAPPED_METHODS = (
    "capitalize casefold count endswith find index isalnum isalpha isdecimal isdigit islower isnumeric isspace istitle"
    " isupper lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split"
    " splitlines startswith strip swapcase title upper __contains__ __getitem__ __eq__ __ne__ __lt__ __le__ __gt__"
    " __ge__"
).split()


def restore(text: str) -> str:
    """Replace all twins by the characters that they stand for."""
    return _TWINS.sub(lambda match: chr(ord(match[0]) - _PLANE), text)


class ClientText(str):
    """Represent a string whose value has twins, while comparisons and searches see the original."""

    __slots__ = ("_guard", "_plain")
    _guard: Guard
    _plain: str

    def __str__(self) -> str:
        return self

    def __hash__(self) -> int:
        return hash(self._plain)


def _wrap_method(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def wrapped(self: ClientText, *arguments: Any, **named: Any) -> Any:
        found = method(self._plain, *map(_plain_argument, arguments), **named)
        return self._guard.strings(found) if isinstance(found, (str, list, tuple)) else found

    return wrapped


def _plain_argument(argument: Any) -> Any:
    if isinstance(argument, ClientText):
        return argument._plain
    if isinstance(argument, str):
        return restore(argument)
    return tuple(map(_plain_argument, argument)) if isinstance(argument, tuple) else argument


for _name in _WRAPPED_METHODS:
    setattr(ClientText, _name, _wrap_method(_name))


class Guard:
    """Protect the characters of `alphabet`, all of them below U+10000 and none white space."""

    def __init__(self, alphabet: Iterable[str]):
        protected = sorted({c for c in alphabet if ord(c) < 0xFFFE and not c.isspace()})
        self._twins = {ord(c): chr(_PLANE + ord(c)) for c in protected}
        self._found = (
            re.compile("[" + re.escape("".join(protected)) + "\U00100000-\U0010ffff]")
            if protected
            else None
        )
        self._escaped = {json.dumps(twin)[1:-1]: twin for twin in self._twins.values()}

    def has_protected(self, value: Any) -> bool:
        """Return True if any string in `value`, or key, has a protected character or a twin."""
        if isinstance(value, str):
            return self._found is not None and self._found.search(value) is not None
        if isinstance(value, dict):
            return any(
                self.has_protected(key) or self.has_protected(item) for key, item in value.items()
            )
        return isinstance(value, (list, tuple)) and any(map(self.has_protected, value))

    def text(self, text: str) -> str:
        """Protect one string. The client's own characters in the plane of twins become U+FFFD."""
        if not self.has_protected(text):
            return text
        plain = _TWINS.sub("\ufffd", text)
        made = ClientText(plain.translate(self._twins))
        made._guard, made._plain = self, plain
        return made

    def strings(self, value: Any) -> Any:
        """Protect every string in `value`, at any depth; keys too."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.strings(key): self.strings(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(map(self.strings, value))
        return value

    def message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Protect a chat message, but not a role of the schema."""
        made: dict[str, Any] = self.strings(message)
        if message["role"] in _ROLES:
            made["role"] = message["role"]
        return made

    def unescaped(self, text: str) -> str:
        """Undo the escapes that `tojson(ensure_ascii=True)` makes of twins."""
        if "\\udb" in text:
            for escaped, twin in self._escaped.items():
                text = text.replace(escaped, twin)
        return text

    def rules(self) -> list[dict[str, Any]]:
        """Return normalizers of the tokenizers library that turn twins back."""
        return [
            {"type": "Replace", "pattern": {"String": twin}, "content": chr(code)}
            for code, twin in self._twins.items()
        ]
