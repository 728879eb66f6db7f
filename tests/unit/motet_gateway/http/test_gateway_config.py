"""Settings that must not start."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from motet_gateway.config import GatewayConfig, is_loopback
from motet_gateway.service import Gateway
from motet_gateway.tenancy.concurrency import ConcurrencyLimits
from motet_shared.errors import ConfigError, Draining, Overloaded
from motet_shared.process.config import load
from motet_shared.testing import memory_buses
from support.running.refusals import refuses


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.9.9.9"])
def test_loopback_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    assert load(GatewayConfig, ["--host", host], {}).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_a_public_host_needs_a_key_or_a_clear_word(host: str, tmp_path: Path) -> None:
    with refuses(ConfigError, "host"):
        load(GatewayConfig, ["--host", host], {})
    assert load(GatewayConfig, ["--host", host, "--insecure"], {}).insecure
    keys = tmp_path / "keys"
    keys.write_text("sesame\n\n  mellon \n")
    config = load(GatewayConfig, ["--host", host], {"MOTET_API_KEY_FILE": str(keys)})
    assert config.api_keys == ("sesame", "mellon")
    assert "sesame" not in repr(config)
    keys.write_text("\n\n")
    with pytest.raises(ConfigError):
        load(GatewayConfig, ["--host", host, "--api-key-file", str(keys)], {})


async def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with memory_buses("gateway") as (bus,):
            with refuses(ConfigError, "port"):
                await Gateway(GatewayConfig(port=port), bus).start()


def test_slots_are_given_back_once() -> None:
    limits = ConcurrencyLimits(3)
    slot = limits.take(2)
    assert not limits.idle.is_set()
    with pytest.raises(Overloaded, match="2"):
        limits.take(2)
    slot.release()
    slot.release()
    assert limits.active == 0
    assert limits.idle.is_set()
    assert limits.refused == 1
    limits.draining = True
    with pytest.raises(Draining):
        limits.take()
