"""Compute names of prompt prefixes, so that a router knows how much of a prompt a cache holds.

A block of tokens is named by a 64-bit hash of it and of all blocks before it. Both sides compute
the same names: a prefix cache announces its blocks, and a router looks up how many blocks of a
prompt are among them. A hash collision would only route a request to a worker that is not the best:
caches are never read by these names.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Sequence

ROOT = 0  # initial value of a chain, unless an adapter has its own root
_PICTURE_BITS = 32  # bits for the position within a picture


def chained(parent: int, names: Sequence[int]) -> int:
    """Return the name of a block of tokens after `parent`, the previous block's name or ROOT."""
    try:
        data = array("q", names).tobytes()
    except OverflowError:  # names of picture tokens exceed 64 bits
        data = repr(list(names)).encode()
    digest = hashlib.blake2b(data, digest_size=8, key=parent.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little")


def chain(names: Sequence[int], block_size: int, root: int = ROOT) -> list[int]:
    """Return the names of the complete blocks of a prompt, in order.

    `root`: initial value of the adapter that computes the prompt.
    """
    called, parent = [], root
    for start in range(0, len(names) - block_size + 1, block_size):
        parent = chained(parent, names[start : start + block_size])
        called.append(parent)
    return called


def picture_names(picture: str, count: int) -> list[int]:
    """Return names for a picture's tokens, from its name and their position.

    They are negative, and so unlike any token id.
    """
    digest = hashlib.blake2b(picture.encode(), digest_size=16).digest()
    first = -1 - (int.from_bytes(digest, "big") << _PICTURE_BITS)
    return list(range(first, first - count, -1))


def prompt_names(
    prompt: Sequence[int], placeholders: Collection[int], pictures: Sequence[tuple[str, int]]
) -> list[int]:
    """Return the names of a prompt's tokens: their ids, or picture names for placeholders.

    placeholders: the tokens that stand for pictures or sound. pictures: name and token count of
    each, in order; the counts must sum to the number of placeholders in the prompt.
    """
    shown = iter([name for picture, count in pictures for name in picture_names(picture, count)])
    return [next(shown) if token in placeholders else token for token in prompt]
