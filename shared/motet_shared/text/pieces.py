"""Build tables of the text of each token id, which turn decoding into list look-ups.

Two families of decoders cover nearly every checkpoint, and both work token by token:

* byte-level BPE (GPT-2, Llama 3, Qwen): a token is a string of bytes, each spelled as one printable
  character;
* SentencePiece with byte fallback (Llama 2, Mistral, Gemma): a token is text with `▁` for a space,
  or a byte `<0xNN>`.

Any other decoder (WordPiece, Metaspace, …) gives None here. Special tokens have no text, except the
tags of tool calls and of reasoning. The tokenizer's detokenization and decode's grammars use these tables, so both
see the same text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from motet_shared.reasoning.registry import TAGS as REASONING_TAGS
from motet_shared.tool_formats.registry import TAGS as TOOL_TAGS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TAGS = TOOL_TAGS | REASONING_TAGS
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Pieces:
    """Hold the text of each token id.

    `text[i]` is None if token `i` is no text on its own; then `data[i]` has its bytes.
    """

    text: list[str | None]
    data: list[bytes]
    # an incomplete character ends at the next text token, and each of its bytes becomes one U+FFFD
    byte_fallback: bool
    strip: int = 0  # number of spaces removed at the start of a text


def build_pieces(tokenizer: Tokenizer, size: int) -> Pieces | None:
    """Return tables for `size` ids, or None if the decoder does not work token by token."""
    steps = _steps(tokenizer)
    kinds = [step["type"] for step in steps]
    hidden = hidden_ids(tokenizer)
    tokens = ["" if i in hidden else tokenizer.id_to_token(i) or "" for i in range(size)]
    if [kind for kind in kinds if kind != "Fuse"] == ["ByteLevel"]:
        return _byte_level(tokens)
    if _is_sentencepiece(steps):
        strip = sum(step["start"] for step in steps if step["type"] == "Strip")
        replaces = [step for step in steps if step["type"] == "Replace"]
        return _sentencepiece(tokens, replaces, "ByteFallback" in kinds, strip)
    return None


def hidden_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Return the ids of special tokens, which are not part of a text."""
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(
        i for i, token in added.items() if token.special and token.content not in _TAGS
    )


def _steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the decoder's steps in order; a Sequence is flattened."""
    if tokenizer.decoder is None:
        return []
    decoder = json.loads(tokenizer.decoder.__getstate__())
    return list(_flatten(decoder))


def _flatten(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _flatten(step)
    else:
        yield decoder


def _is_sentencepiece(steps: list[dict[str, Any]]) -> bool:
    """Return True if the steps are Replace*, ByteFallback?, Fuse, Strip?, in this order.

    All of them work on single tokens except the strip at the start.
    """
    order = ["Replace", "ByteFallback", "Fuse", "Strip"]
    kinds = [step["type"] for step in steps]
    if "Replace" not in kinds or "Fuse" not in kinds or not set(kinds) <= set(order):
        return False
    if kinds != sorted(kinds, key=order.index) or kinds.count("Strip") > 1:
        return False
    strips = [step for step in steps if step["type"] == "Strip"]
    replaces = [step for step in steps if step["type"] == "Replace"]
    if any("String" not in replace["pattern"] for replace in replaces):
        return False
    return all(strip["content"] == " " and strip["stop"] == 0 for strip in strips)


# ----------------------------------------------------------------------------------- byte-level BPE
def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's character of each byte, inverted.

    Printable bytes are spelled as themselves, the others as characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + n): byte for n, byte in enumerate(others)
    }


def _byte_level(tokens: list[str]) -> Pieces:
    spelled = str.maketrans({char: chr(byte) for char, byte in _byte_of_character().items()})
    known = set(_byte_of_character())
    # An added token may contain characters that spell no byte; such a token is plain text.
    data = [
        token.translate(spelled).encode("latin-1") if known.issuperset(token) else token.encode()
        for token in tokens
    ]
    return Pieces(text=[_as_text(part) for part in data], data=data, byte_fallback=False)


def _as_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


# ------------------------------------------------------------------------------------ SentencePiece
def _sentencepiece(
    tokens: list[str], replaces: list[dict[str, Any]], byte_fallback: bool, strip: int
) -> Pieces:
    text: list[str | None] = []
    data: list[bytes] = []
    for token in tokens:
        for step in replaces:
            token = token.replace(step["pattern"]["String"], step["content"])
        match = _BYTE_TOKEN.fullmatch(token) if byte_fallback else None
        text.append(None if match else token)
        data.append(bytes([int(match[1], 16)]) if match else token.encode())
    return Pieces(text=text, data=data, byte_fallback=byte_fallback, strip=strip)
