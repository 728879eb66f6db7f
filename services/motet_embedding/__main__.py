"""Run one text embedding process: `python -m motet_embedding`."""

from motet_shared.process.starts import importing

with importing():
    from motet_shared.process.actor import run

    from .config import EmbeddingConfig
    from .service import Embedding

if __name__ == "__main__":
    run(Embedding, EmbeddingConfig)
