"""Run one diffusion worker: `python -m motet_diffusion --model FOLDER`."""

from motet_shared.process.starts import importing

with importing():
    from motet_shared.process.actor import run

    from .config import DiffusionConfig
    from .service import Diffusion

if __name__ == "__main__":
    run(Diffusion, DiffusionConfig)
