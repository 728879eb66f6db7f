"""Run one speech recognition process: `python -m motet_asr --model FOLDER`."""

from motet_shared.process.starts import importing

with importing():
    from motet_shared.process.actor import run

    from .config import AsrConfig
    from .service import Asr

if __name__ == "__main__":
    run(Asr, AsrConfig)
