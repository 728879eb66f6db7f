"""Run one voice activity process: `python -m motet_vad`."""

from motet_shared.process.starts import importing

with importing():
    from motet_shared.process.actor import run

    from .config import VadConfig
    from .service import Vad

if __name__ == "__main__":
    run(Vad, VadConfig)
