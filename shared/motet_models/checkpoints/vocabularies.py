"""Name the files of vocabularies in older formats, of which a tokenizer.json is made."""

from __future__ import annotations

from pathlib import Path

# In the order in which one is chosen.
VOCABULARIES = (
    "tokenizer.model",
    "tekken.json",
    "tokenizer.model.v3",
    "tokenizer.model.v7",
    "spiece.model",
    "tiktoken.model",
    "vocab.json",
    "vocab.txt",
)


def find_vocabulary(folder: Path) -> Path | None:
    """Return the vocabulary of a folder; None if it has none."""
    return next((folder / name for name in VOCABULARIES if (folder / name).is_file()), None)
