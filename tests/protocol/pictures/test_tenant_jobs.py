"""Jobs of tenants: each has its own, whatever they are called, and pays for a picture once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from motet_gateway.service import Gateway
from motet_shared.testing import NatsServer
from support.stages.served_gateway import served_gateway
from support.stages.tenants_stage import ACME, OTHER, bearer, document

BODY: dict[str, Any] = {"id": "mine", "model": "brush", "prompt": "two red circles", "seed": 5}


@asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    """Nobody draws: jobs stay where they are."""
    file = tmp_path / "tenants.toml"
    file.write_text(document("images_per_hour = 3"))
    async with (
        NatsServer(store=tmp_path / "jetstream") as nats,
        served_gateway(nats, tenants_file=file, jobs=0) as gateway,
        httpx.AsyncClient(
            trust_env=False, base_url=f"http://127.0.0.1:{gateway.port}/v1/images", timeout=30
        ) as http,
    ):
        yield gateway, http


async def test_jobs_are_their_tenants(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, http):
        mine = await http.post("/jobs", json=BODY, headers=bearer())
        assert (mine.status_code, mine.json()["id"]) == (202, "mine")
        stranger = await http.get("/jobs/mine", headers=bearer(OTHER))
        assert stranger.status_code == 404
        assert "'mine'" in stranger.json()["error"]["message"]
        assert (await http.delete("/jobs/mine", headers=bearer(OTHER))).status_code == 404
        theirs = await http.post("/jobs", json=BODY | {"prompt": "another"}, headers=bearer(OTHER))
        assert theirs.status_code == 202, "the same name, another job"
        assert (await http.delete("/jobs/mine", headers=bearer(OTHER))).json()[
            "status"
        ] == "cancelled"
        for name in ("of.other.mine", "stop.mine", "seq.mine"):
            assert (await http.get(f"/jobs/{name}", headers=bearer())).status_code == 404
        assert (await http.get("/jobs/mine", headers=bearer())).json()["status"] == "queued"


async def test_a_job_is_paid_for_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as (gateway, http):
        for _ in range(5):
            assert (
                await http.post("/jobs", json=BODY | {"n": 2}, headers=bearer())
            ).status_code == 202
        conflict = await http.post("/jobs", json=BODY | {"n": 1}, headers=bearer())
        assert conflict.status_code == 400
        assert "'mine'" in conflict.json()["error"]["message"]
        refused = await http.post("/jobs", json=BODY | {"id": "next", "n": 2}, headers=bearer())
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            429,
            "rate_limit_exceeded",
        )
        assert (await http.get("/jobs/next", headers=bearer())).status_code == 404
        assert (
            await http.post("/jobs", json=BODY | {"id": "last"}, headers=bearer())
        ).status_code == 202
        assert gateway.service is not None
        key = {"headers": [(b"authorization", f"Bearer {ACME}".encode())]}
        bucket = gateway.service.authenticator.authenticate(key).tenant.images.bucket
        assert bucket is not None
        assert bucket.level == 0
        gateway.check_integrity()
