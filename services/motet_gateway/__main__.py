"""`python -m motet_gateway`: run one gateway."""

from motet_shared.starts import importing

with importing():
    from motet_shared.actor import run

    from .config import GatewayConfig
    from .gateway import Gateway

if __name__ == "__main__":
    run(Gateway, GatewayConfig)
