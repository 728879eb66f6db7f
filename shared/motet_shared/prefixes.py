"""What the beginnings of prompts are called, so that a router knows which cache holds how much of one.

A block of tokens goes by 64 bits of a hash of it and of all blocks before it. Both sides compute the same: a prefix
cache tells which blocks it holds, and whoever has a prompt looks up how many of its blocks these are. Two blocks that
met by chance would send a request to another worker than the best; no cache is read by these names.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

ROOT = 0  # what a chain begins with, unless an adapter has a root of its own
_PICTURE_BITS = 32  # of a place within a picture


def chained(parent: int, names: Sequence[int]) -> int:
    """What the block of these tokens is called after `parent`, the block before it, or ROOT."""
    try:
        data = array("q", names).tobytes()
    except OverflowError:  # tokens of pictures
        data = repr(list(names)).encode()
    digest = hashlib.blake2b(data, digest_size=8, key=parent.to_bytes(8, "little")).digest()
    return int.from_bytes(digest, "little")


def chain(names: Sequence[int], block_size: int, root: int = ROOT) -> list[int]:
    """What the whole blocks of a prompt are called, from the first one on; `root`: of the adapter that computes it."""
    called, parent = [], root
    for start in range(0, len(names) - block_size + 1, block_size):
        parent = chained(parent, names[start : start + block_size])
        called.append(parent)
    return called


def picture_names(picture: str, count: int) -> list[int]:
    """What the tokens of a picture are called: by its name and by their place, below 0, so unlike any token."""
    digest = hashlib.blake2b(picture.encode(), digest_size=16).digest()
    first = -1 - (int.from_bytes(digest, "big") << _PICTURE_BITS)
    return list(range(first, first - count, -1))


def prompt_names(prompt: Sequence[int], placeholder: int, pictures: Sequence[tuple[str, int]]) -> list[int]:
    """What the tokens of a prompt are called: themselves, but for placeholders, which are those of the pictures.

    pictures: name and number of tokens of each, in the order of the placeholders, which must be as many.
    """
    shown = iter([name for picture, count in pictures for name in picture_names(picture, count)])
    return [next(shown) if token == placeholder else token for token in prompt]
