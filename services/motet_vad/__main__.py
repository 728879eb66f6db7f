"""`python -m motet_vad`: run one voice activity process."""

from motet_shared.starts import importing

with importing():
    from motet_shared.actor import run

    from .config import VadConfig
    from .service import Vad

if __name__ == "__main__":
    run(Vad, VadConfig)
