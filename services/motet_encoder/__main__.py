"""Run one process that encodes pictures for a language model: `python -m motet_encoder`."""

from motet_shared.process.starts import importing

with importing():
    from motet_shared.process.actor import run

    from .config import EncoderConfig
    from .service import Encoder

if __name__ == "__main__":
    run(Encoder, EncoderConfig)
