"""Decode token ids to text incrementally, never half a character.

The text returned after n ids is a function of these n ids alone, however they were grouped into
calls. All detokenizers agree with decoding the whole sequence at once, with one exception that
streaming forces: where a model emits bytes that are no UTF-8, SentencePiece's decoder drops the
valid characters next to them, which were sent long before.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from tokenizers import Tokenizer

from motet_shared.text.pieces import Pieces

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_utf_8_decode = codecs.utf_8_decode


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error("motet-each-byte", _each_byte)


class Detokenizer(Protocol):
    """Decode the ids of one request incrementally."""

    def feed(self, ids: list[int]) -> str:
        """Return the text that these ids complete.

        Raises IndexError for an id outside the vocabulary.
        """

    def flush(self) -> str:
        """Return the rest at the end: U+FFFD for half a character, else nothing."""


class ByteDetokenizer:
    """Decode byte-level BPE. Most tokens are whole characters: one list look-up."""

    __slots__ = ("_data", "_pending", "_text")

    def __init__(self, pieces: Pieces):
        self._text = pieces.text
        self._data = pieces.data
        self._pending = b""

    def feed(self, ids: list[int]) -> str:
        if not self._pending:
            try:
                return "".join([self._text[i] for i in ids])  # type: ignore[misc]
            except TypeError:  # a token that is not valid text on its own
                pass
        data = self._pending + b"".join([self._data[i] for i in ids])
        text, used = _utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        text, self._pending = self._pending.decode(errors="replace"), b""
        return text


class FallbackDetokenizer:
    """Decode SentencePiece, with or without byte fallback.

    `strip`: number of spaces to remove at the start of the text.
    """

    __slots__ = ("_data", "_pending", "_strip", "_text")

    def __init__(self, pieces: Pieces, strip: int):
        self._text = pieces.text
        self._data = pieces.data
        self._strip = strip
        self._pending = b""

    def feed(self, ids: list[int]) -> str:
        if not self._pending and not self._strip:
            try:
                return "".join([self._text[i] for i in ids])  # type: ignore[misc]
            except TypeError:  # a byte token
                pass
        return self._stripped("".join([self._step(i) for i in ids]))

    def _step(self, token: int) -> str:
        text = self._text[token]
        if text is None:
            data = self._pending + self._data[token]
            text, used = _utf_8_decode(data, "motet-each-byte", False)
            self._pending = data[used:]
            return text
        return self._broken() + text if text else ""

    def _broken(self) -> str:
        """Return U+FFFD for each byte of a run that ended within a character."""
        text, self._pending = REPLACEMENT * len(self._pending), b""
        return text

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] == " ":
                self._strip, text = self._strip - 1, text[1:]
            else:
                self._strip = 0
        return text

    def flush(self) -> str:
        return self._stripped(self._broken())


class WindowDetokenizer:
    """Decode with any other decoder: a short window of ids twice, without and with the new one.

    Tens of times slower than the other detokenizers.
    """

    __slots__ = ("_hidden", "_prefix", "_tokenizer", "_window")

    def __init__(self, tokenizer: Tokenizer, hidden: frozenset[int]):
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._window: list[int] = []  # ids whose text may depend on each other
        self._prefix = 0  # number of its first ids whose text is already sent

    def feed(self, ids: list[int]) -> str:
        return "".join([self._step(i) for i in ids if i not in self._hidden])

    def _step(self, token: int) -> str:
        self._window.append(token)
        text = self._new_text()
        if not text or text.endswith(REPLACEMENT):
            return ""
        self._window = self._window[self._prefix :]
        self._prefix = len(self._window)
        return text

    def _new_text(self) -> str:
        decode = self._tokenizer.decode
        sent = decode(self._window[: self._prefix], skip_special_tokens=False)
        return decode(self._window, skip_special_tokens=False)[len(sent) :]

    def flush(self) -> str:
        text = self._new_text()
        self._window, self._prefix = [], 0
        return text
