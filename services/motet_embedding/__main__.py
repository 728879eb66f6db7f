"""Run one process of role embedding or ranking: `python -m motet_embedding --model FOLDER`."""

import os

from motet_shared.process.starts import importing

# oneDNN keeps what it compiled for a shape, 32 KB each, and shapes change with the tokens of a batch (default: 1,024).
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
with importing():
    from motet_shared.errors import ConfigError
    from motet_shared.process.actor import Actor, run
    from motet_shared.process.config import load

    from .config import EmbeddingConfig
    from .ranking import RankingService
    from .service import Embedding


def main() -> None:
    worker: type[Actor] = Embedding
    try:
        if load(EmbeddingConfig, prog="motet-embedding").role == "ranking":
            worker = RankingService
    except ConfigError:
        pass  # `run` reports it
    run(worker, EmbeddingConfig)


if __name__ == "__main__":
    main()
