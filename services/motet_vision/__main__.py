"""`python -m motet_vision`: run one process that encodes pictures for a language model."""

from motet_shared.starts import importing

with importing():
    from motet_shared.actor import run

    from .config import VisionConfig
    from .service import Vision

if __name__ == "__main__":
    run(Vision, VisionConfig)
