"""`python -m motet_embedding`: run one process that turns texts into vectors."""

from motet_embedding.config import EmbeddingConfig
from motet_embedding.service import Embedding
from motet_shared.actor import run

if __name__ == "__main__":
    run(Embedding, EmbeddingConfig)
