"""`python -m motet_vad`: run one voice activity process."""

from motet_shared.actor import run
from motet_vad.config import VadConfig
from motet_vad.service import Vad

if __name__ == "__main__":
    run(Vad, VadConfig)
