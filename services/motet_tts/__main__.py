"""Run one text-to-speech process: `python -m motet_tts --model FOLDER`."""

from motet_shared.process.starts import importing

with importing():
    from motet_shared.process.actor import run

    from .config import TtsConfig
    from .service import Tts

if __name__ == "__main__":
    run(Tts, TtsConfig)
