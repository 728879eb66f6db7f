"""`python -m motet_llm --model FOLDER`: one decode worker."""

from motet_shared.actor import run

from .worker import Decode, DecodeConfig

if __name__ == "__main__":
    run(Decode, DecodeConfig)
