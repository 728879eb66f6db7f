"""Run one text-to-speech process: `python -m motet_tts --model FOLDER`."""

import os

from motet_shared.process.starts import importing

# oneDNN keeps what it compiled for a shape, 32 to 75 KB each, and shapes change with every length of a text. The
# default is 1,024; more than a frame's own bring no speed.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
with importing():
    from motet_shared.process.actor import run

    from .config import TtsConfig
    from .service import Tts

if __name__ == "__main__":
    run(Tts, TtsConfig)
