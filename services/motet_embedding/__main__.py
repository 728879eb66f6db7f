"""`python -m motet_embedding`: run one process that turns texts into vectors."""

from motet_shared.starts import importing

with importing():
    from motet_shared.actor import run

    from .config import EmbeddingConfig
    from .service import Embedding

if __name__ == "__main__":
    run(Embedding, EmbeddingConfig)
