"""Take the input of a custom tool out of the JSON of its call, while that arrives."""

from __future__ import annotations

import json
import re

from motet_gateway.responses.tools import INPUT

_HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}
_PLAIN = re.compile(r'[^"\\]+')
_HEX = re.compile(r"[0-9a-fA-F]{4}")


class CustomInput:
    """Decode `{"input": "…"}` incrementally.

    Text that has another shape, which a model that is not held to a grammar may write, is the input
    as it stands.
    """

    def __init__(self) -> None:
        self._json = ""  # all of it so far
        self._at = 0  # where the part that is not decoded yet begins
        self._opened = False
        self._closed = False
        self.text = ""  # the input so far

    def feed(self, arguments: str) -> str:
        """Add a piece of the arguments; return what it adds to the input."""
        self._json += arguments
        if not self._opened:
            head = _HEAD.match(self._json)
            if head is None:
                return ""
            self._opened, self._at = True, head.end()
        before = len(self.text)
        self._decode()
        return self.text[before:]

    def finish(self) -> str:
        """Return what remains: nothing if the arguments were as expected, else all of them."""
        if self._opened:
            return ""
        try:
            found = json.loads(self._json)[INPUT]
            self.text = found if isinstance(found, str) else self._json
        except (ValueError, LookupError, TypeError):
            self.text = self._json
        return self.text

    def _decode(self) -> None:
        """Decode up to the closing quotation mark, or as far as escapes are complete."""
        parts: list[str] = []
        while not self._closed and self._at < len(self._json):
            plain = _PLAIN.match(self._json, self._at)
            if plain is not None:
                parts.append(plain[0])
                self._at = plain.end()
            elif self._json[self._at] == '"':
                self._closed = True
            elif not self._escape(parts):
                break
        self.text += "".join(parts)

    def _escape(self, parts: list[str]) -> bool:
        """Decode one escape; return False if it is not complete yet."""
        mark = self._json[self._at + 1 : self._at + 2]
        if mark != "u":
            if not mark:
                return False
            parts.append(_ESCAPES.get(mark, mark))
            self._at += 2
            return True
        code = self._json[self._at + 2 : self._at + 6]
        if len(code) < 4:
            return False
        value = int(code, 16) if _HEX.fullmatch(code) else 0xFFFD
        if 0xD800 <= value < 0xDC00:  # the first half of a pair
            low = self._json[self._at + 6 : self._at + 12]
            if len(low) < 6 and "\\u".startswith(low[:2]):
                return False
            if low[:2] == "\\u" and _HEX.fullmatch(low[2:]) and 0xDC00 <= int(low[2:], 16) < 0xE000:
                value = 0x10000 + ((value - 0xD800) << 10) + int(low[2:], 16) - 0xDC00
                self._at += 6
        parts.append(chr(value) if not 0xD800 <= value < 0xE000 else "\ufffd")
        self._at += 6
        return True
