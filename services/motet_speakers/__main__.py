"""Run one speaker embedding process: `python -m motet_speakers`."""

from motet_shared.process.starts import importing

with importing():
    from motet_shared.process.actor import run

    from .config import SpeakersConfig
    from .service import Speakers

if __name__ == "__main__":
    run(Speakers, SpeakersConfig)
