"""`python -m motet_speakers`: run one process that tells how speakers sound."""

from motet_shared.actor import run
from motet_speakers.config import SpeakersConfig
from motet_speakers.service import Speakers

if __name__ == "__main__":
    run(Speakers, SpeakersConfig)
