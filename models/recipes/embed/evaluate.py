"""Score a pocket-embed folder by held-out retrieval, with motet-embedding's encoder.

python models/recipes embed.evaluate models/pocket-embed

`first`: share of anchors whose nearest text, of all positives and negatives, is their own positive.
`near`: share that is nearer to its own positive than to its own negative.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from motet_embedding.config import EngineConfig
from motet_embedding.encoder import Encoder
from motet_embedding.folder import Folder
from motet_embedding.texts import Texts
from recipes.embed.data import held_out

KINDS = ("world", "general")
_BATCH = 64


class Embedder:
    """Embed texts as the service does."""

    def __init__(self, folder: Path) -> None:
        self._encoder = Encoder.load(EngineConfig(model=str(folder)))
        self._texts = Texts(Folder.read(folder), self._encoder.limit, self._encoder.vocabulary)

    def vectors(self, texts: list[str]) -> torch.Tensor:
        """Return the embeddings of texts, `[texts, D]`."""
        tokenized = self._texts.read(texts)
        return torch.cat(
            [
                self._encoder.encode(tokenized[at : at + _BATCH])
                for at in range(0, len(tokenized), _BATCH)
            ]
        )


def retrieval(embedder: Embedder, kind: str, count: int) -> dict[str, float]:
    """Return the shares `first` and `near` over `count` held-out triplets of `kind`."""
    triplets = list(held_out(kind, count))
    anchors, positives, negatives = (
        embedder.vectors([getattr(one, name) for one in triplets])
        for name in ("anchor", "positive", "negative")
    )
    scores = anchors @ torch.cat([positives, negatives]).T
    own = torch.arange(len(triplets))
    first = (scores.argmax(dim=1) == own).float().mean()
    nearer = (scores[own, own] > scores[own, len(triplets) + own]).float().mean()
    return {"first": round(float(first), 3), "near": round(float(nearer), 3)}


def report(folder: Path, count: int = 500) -> dict[str, dict[str, float]]:
    """Return the shares of both kinds."""
    embedder = Embedder(folder)
    return {kind: retrieval(embedder, kind, count) for kind in KINDS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=500, help="held-out triplets of each kind")
    args = parser.parse_args()
    print(json.dumps(report(args.folder, args.count), indent=1))


if __name__ == "__main__":
    main()
