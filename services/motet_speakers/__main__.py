"""`python -m motet_speakers`: run one process that tells how speakers sound."""

from motet_shared.starts import importing

with importing():
    from motet_shared.actor import run

    from .config import SpeakersConfig
    from .service import Speakers

if __name__ == "__main__":
    run(Speakers, SpeakersConfig)
