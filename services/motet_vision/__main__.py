"""Run one process that encodes pictures for a language model: `python -m motet_vision`."""

from motet_shared.process.starts import importing

with importing():
    from motet_shared.process.actor import run

    from .config import VisionConfig
    from .service import Vision

if __name__ == "__main__":
    run(Vision, VisionConfig)
