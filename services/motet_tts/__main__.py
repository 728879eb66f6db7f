"""`python -m motet_tts --model FOLDER`: one speech worker."""

from motet_shared.starts import importing

with importing():
    from motet_shared.actor import run

    from .config import TtsConfig
    from .service import Tts

if __name__ == "__main__":
    run(Tts, TtsConfig)
