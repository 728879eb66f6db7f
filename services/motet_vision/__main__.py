"""`python -m motet_vision`: run one process that encodes pictures for a language model."""

from motet_shared.actor import run
from motet_vision.config import VisionConfig
from motet_vision.service import Vision

if __name__ == "__main__":
    run(Vision, VisionConfig)
