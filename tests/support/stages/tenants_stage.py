"""Run a gateway in memory with a tenants file and a clock for its limits."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from motet_gateway.tenancy.buckets import NANOSECONDS
from motet_shared.tenants import digest
from support.clients.gateway_client import Http, World, world

ACME, OTHER, GONE = "sk-motet-acme", "sk-motet-other", "sk-motet-gone"


class Now:
    """Define a clock that moves only on request."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns

    def wait(self, seconds: float) -> None:
        self.ns += round(seconds * NANOSECONDS)


def bearer(key: str = ACME) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def document(limits: str, keys: tuple[str, ...] = (ACME,)) -> str:
    text = f"[tenants.acme]\n{limits}\n\n[tenants.other]\n\n"
    text += "".join(f'[[keys]]\ntenant = "acme"\nsha256 = "{digest(key)}"\n\n' for key in keys)
    return text + f'[[keys]]\ntenant = "other"\nsha256 = "{digest(OTHER)}"\n'


class Limited:
    """Hold the gateway and the clock of its limits."""

    def __init__(self, made: World, now: Now, path: Path):
        self.made, self.now, self.path = made, now, path

    def ask(self, key: str = ACME, path: str = "/v1/chat/completions", **fields: Any) -> Http:
        return self.made.ask(path, headers=bearer(key), **fields)

    async def done(self, key: str = ACME, **fields: Any) -> Http:
        return await self.ask(key, **fields).done()

    def tenant(self, key: str = ACME) -> Any:
        return self.made.service.authenticator.authenticate(
            {"headers": [(b"authorization", f"Bearer {key}".encode())]}
        ).tenant

    def tokens(self) -> int:
        bucket = self.tenant().tokens.bucket
        assert bucket is not None
        return int(bucket.level)

    def metrics(self) -> str:
        return self.made.service.metrics.registry.render().decode()


@asynccontextmanager
async def limited(tmp_path: Path, limits: str = "", **settings: Any) -> AsyncIterator[Limited]:
    path, now = tmp_path / "tenants.toml", Now()
    path.write_text(document(limits))
    async with world(clock=now, tenants_file=path, patience=0.2, **settings) as made:
        yield Limited(made, now, path)


async def refused(http: Http) -> dict[str, Any]:
    await http.done()
    assert http.status == 429, http.body
    body: dict[str, Any] = http.json()
    # Ollama's format has the fields of the error beside its message.
    error: dict[str, Any] = body["error"] if isinstance(body["error"], dict) else body
    assert error["code"] == "rate_limit_exceeded"
    return error
