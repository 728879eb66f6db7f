"""`python -m motet_llm --model FOLDER`: one decode worker."""

import os

from motet_shared.actor import run

if __name__ == "__main__":
    # torch's profiler reads it when torch is loaded; it would greet every recording among the lines of our log.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from .worker import Decode, DecodeConfig

    run(Decode, DecodeConfig)
