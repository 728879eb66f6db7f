"""`python -m motet_asr --model FOLDER`: one speech recognition process."""

from motet_shared.starts import importing

with importing():
    from motet_shared.actor import run

    from .config import AsrConfig
    from .service import Asr

if __name__ == "__main__":
    run(Asr, AsrConfig)
