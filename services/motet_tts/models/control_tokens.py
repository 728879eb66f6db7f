"""Keep a client's text free of what a tokenizer would read as control tokens."""

from __future__ import annotations

import re
from typing import Any

_TAG = re.compile(r"<[^<>]*>")


class ControlTokens:
    """Remove the spellings of a tokenizer's added tokens from texts, however many there are."""

    def __init__(self, tokenizer: Any):
        added = tokenizer.get_added_vocab()
        self._tags = frozenset(token for token in added if _TAG.fullmatch(token))
        self._others = [token for token in added if token and token not in self._tags]

    def plain(self, text: str) -> str:
        """Return a text with a space in place of each control token, nested ones included."""
        while (shorter := self._once(text)) != text:
            text = shorter
        return text

    def _once(self, text: str) -> str:
        for token in self._others:
            text = text.replace(token, " ")
        return _TAG.sub(lambda found: " " if found[0] in self._tags else found[0], text)
