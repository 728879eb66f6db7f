"""`python -m motet_tts --model FOLDER`: one speech worker."""

from motet_shared.actor import run

if __name__ == "__main__":
    from .config import TtsConfig
    from .service import Tts

    run(Tts, TtsConfig)
