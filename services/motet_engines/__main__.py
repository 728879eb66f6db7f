"""Run one process that serves another engine: `python -m motet_engines`."""

from motet_shared.process.starts import importing

with importing():
    from motet_shared.process.actor import run

    from .config import EnginesConfig
    from .service import EngineHost

if __name__ == "__main__":
    run(EngineHost, EnginesConfig)
