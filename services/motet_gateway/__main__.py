"""Run one gateway (`python -m motet_gateway`)."""

from motet_shared.process.starts import importing

with importing():
    from motet_shared.process.actor import run

    from .config import GatewayConfig
    from .service import Gateway

if __name__ == "__main__":
    run(Gateway, GatewayConfig)
