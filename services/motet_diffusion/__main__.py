"""`python -m motet_diffusion --model FOLDER`: one diffusion worker."""

from motet_shared.starts import importing

with importing():
    from motet_shared.actor import run

    from .config import DiffusionConfig
    from .service import Diffusion

if __name__ == "__main__":
    run(Diffusion, DiffusionConfig)
