"""How well a folder finds what says the same: held-out retrieval, as motet-embedding computes it.

    python models/recipes/embed_evaluate.py models/pocket-embed

For every held-out text, the nearest of all other wordings and of all texts that differ in one thing must be its own
other wording. `near` counts only against its own text that differs in one thing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from embed_data import held_out
from motet_embedding.config import EngineConfig
from motet_embedding.encoder import Encoder
from motet_embedding.folder import Folder
from motet_embedding.texts import Texts

KINDS = ("world", "general")
_BATCH = 64


class Reader:
    """Texts to vectors, as the service does it."""

    def __init__(self, folder: Path) -> None:
        self._encoder = Encoder.load(EngineConfig(model=str(folder)))
        self._texts = Texts(Folder.read(folder), self._encoder.limit, self._encoder.vocabulary)

    def vectors(self, texts: list[str]) -> torch.Tensor:
        """`[texts, D]`."""
        read = self._texts.read(texts)
        return torch.cat(
            [self._encoder.encode(read[at : at + _BATCH]) for at in range(0, len(read), _BATCH)]
        )


def retrieval(reader: Reader, kind: str, count: int) -> dict[str, float]:
    """Shares of `count` held-out cases of a kind."""
    cases = list(held_out(kind, count))
    text, same, near = (
        reader.vectors([getattr(one, name) for one in cases]) for name in ("text", "same", "near")
    )
    scores = text @ torch.cat([same, near]).T
    own = torch.arange(len(cases))
    first = (scores.argmax(dim=1) == own).float().mean()
    nearer = (scores[own, own] > scores[own, len(cases) + own]).float().mean()
    return {"first": round(float(first), 3), "near": round(float(nearer), 3)}


def report(folder: Path, count: int = 500) -> dict[str, dict[str, float]]:
    reader = Reader(folder)
    return {kind: retrieval(reader, kind, count) for kind in KINDS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=500, help="held-out cases of each kind")
    args = parser.parse_args()
    print(json.dumps(report(args.folder, args.count), indent=1))


if __name__ == "__main__":
    main()
