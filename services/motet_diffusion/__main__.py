"""`python -m motet_diffusion --model FOLDER`: one diffusion worker."""

from motet_shared.actor import run

if __name__ == "__main__":
    from .config import DiffusionConfig
    from .service import Diffusion

    run(Diffusion, DiffusionConfig)
