"""Three nats-servers of services/nats-cluster.conf: one dies, and neither streams nor what is stored goes with it."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from motet_cli.joining.certificates import make_authority, make_certificate
from motet_gateway.storage.documents import SMALL, JetStreamDocuments
from motet_gateway.storage.jetstream import connect
from motet_gateway.storage.work_queue import WorkQueue
from motet_shared.errors import ConfigError, StreamBroken
from motet_shared.messages import Echo, Text
from motet_shared.peer_tls import peer_tls
from motet_shared.process.config import ProcessConfig
from motet_shared.testing import NATS_CONF, NatsServer, free_port
from motet_shared.wire.bus import Bus
from support.services.echo_worker import EchoWorker

CLUSTER_CONF = NATS_CONF.with_name("nats-cluster.conf")
HOST = "127.0.0.1"
TOKENS = 160


class Cluster:
    """The servers, and the settings with which processes connect to all of them."""

    def __init__(self, servers: list[NatsServer], files: dict[str, Path]):
        self.servers, self._files = servers, files

    def config(self, role: str) -> ProcessConfig:
        given: dict[str, Any] = self._files
        return ProcessConfig(
            nats_url=",".join(f"tls://{HOST}:{server.port}" for server in self.servers),
            nats_credentials=self.servers[0].credentials,
            metrics_port=-1,
            **given,
        )

    @asynccontextmanager
    async def bus(self, role: str) -> AsyncIterator[Bus]:
        config = self.config(role)
        bus = await Bus.connect(config.instance_id(role), config)
        try:
            yield bus
        finally:
            await bus.close()

    def server_of(self, bus: Bus) -> NatsServer:
        """Return the server that a bus's frames go through."""
        url = bus.frames.client.connected_url  # type: ignore[attr-defined]
        return next(server for server in self.servers if server.port == url.port)


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    make_authority(tmp_path)
    cert, key = make_certificate(tmp_path, [HOST], "host")
    files = {"peer_ca": tmp_path / "ca.crt", "peer_cert": cert, "peer_key": key}
    tls = peer_tls(**files)
    assert tls is not None
    password, ports = "p" + secrets.token_hex(16), [free_port() for _ in range(3)]
    servers = []
    for number, port in enumerate(ports):
        routes = [f"nats://cluster:{password}@{HOST}:{one}" for one in ports if one != port]
        env = {
            **{f"MOTET_{name.upper()}": str(path) for name, path in files.items()},
            "MOTET_NATS_NAME": f"server-{number}",
            "MOTET_NATS_CLUSTER": f"{HOST}:{port}",
            "MOTET_NATS_CLUSTER_PASSWORD": password,
            "MOTET_NATS_ROUTES": f"[{', '.join(routes)}]",
            "MOTET_STORE_SIZE": "200MB",
        }
        store = tmp_path / f"store-{number}"
        servers.append(NatsServer(CLUSTER_CONF, store, env=env, tls=tls.client))
    for server in servers[1:]:  # one set of passwords
        shutil.copytree(
            servers[0]._folder / "server", server._folder / "server", dirs_exist_ok=True
        )
    async with AsyncExitStack() as exits:
        await asyncio.gather(*(exits.enter_async_context(server) for server in servers))
        yield Cluster(servers, files)


@asynccontextmanager
async def documents(cluster: Cluster) -> AsyncIterator[tuple[Bus, JetStreamDocuments]]:
    async with cluster.bus("gateway") as bus:
        async with asyncio.timeout(60):
            while (client := await connect(bus)) is None:  # noqa: ASYNC110  (they elect a leader)
                await asyncio.sleep(0.2)
        yield bus, JetStreamDocuments(client, "motet_responses", 600.0)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("deaths", [1, 3])
@pytest.mark.extended("storm", after=1)
async def test_what_is_stored_outlives_servers_in_turn(cluster: Cluster, deaths: int) -> None:
    """Two elections, of seconds each, are most of its time: the first, and that after a death."""
    large = os.urandom(3 * SMALL)
    async with documents(cluster) as (bus, kept):
        await kept.put("acme", "large", large)
        client = bus.frames.client  # type: ignore[attr-defined]
        queue = await WorkQueue.open(
            client, "motet_jobs", "motet.v2.jobs.x", consumer="c", ttl=60, patience=5
        )
        await queue.push("job")
        info = await client.jetstream().stream_info("motet_jobs")
        assert info.config.num_replicas == 3
        for number in range(deaths):
            await kept.put("acme", f"small-{number}", str(number).encode())
            server = cluster.server_of(bus)
            await server.kill()
            async with asyncio.timeout(60):
                while await readable(kept, "large") != large:  # noqa: ASYNC110
                    await asyncio.sleep(0.2)
            assert await kept.get("acme", f"small-{number}") == str(number).encode()
            await kept.put("acme", "changed", str(number).encode())
            await server.start()
            await in_step(bus)
        assert await kept.get("acme", "changed") == str(deaths - 1).encode()


async def readable(kept: JetStreamDocuments, name: str) -> bytes | None:
    """Return a document; None while the servers elect another leader."""
    try:
        return await kept.get("acme", name)
    except Exception:
        return None


async def in_step(bus: Bus) -> None:
    """Wait until all three replicas of what is stored are current."""
    js = bus.frames.client.jetstream(timeout=5)  # type: ignore[attr-defined]
    async with asyncio.timeout(60):
        for stream in ("KV_motet_responses_acme", "OBJ_motet_responses_acme"):
            while True:
                cluster = (await js.stream_info(stream)).cluster
                peers = cluster.replicas or [] if cluster is not None else []
                if len(peers) == 2 and all(peer.current and not peer.offline for peer in peers):
                    break
                await asyncio.sleep(0.2)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("whose", ["caller", "worker"])
async def test_a_stream_goes_on_over_the_death_of_a_server(cluster: Cluster, whose: str) -> None:
    async with cluster.bus("gateway") as caller, cluster.bus("tokenizer") as bus:
        worker = EchoWorker(cluster.config("tokenizer"), bus)
        await worker.start()
        await caller.directory.wait_for(lambda d: d.ready("tokenizer"), 20)
        found: list[int] = []
        broken = 0
        while len(found) < TOKENS:
            # What was on its way is lost with the server; then a caller goes on from what it has.
            start = len(found)
            try:
                async with caller.open(
                    "tokenizer", Echo(count=TOKENS - start, delay_ms=10)
                ) as stream:
                    async for item in stream:
                        assert isinstance(item, Text)
                        found += [start + one for one in item.ids]
                        if len(found) == TOKENS // 8:
                            await cluster.server_of(caller if whose == "caller" else bus).kill()
            except StreamBroken:
                broken += 1
                assert broken <= 2, "one death breaks a stream once"
        assert found == list(range(TOKENS))


async def test_a_route_needs_the_password_besides_a_certificate(cluster: Cluster) -> None:
    """Every host of the stack has a certificate; a server without the password becomes no member."""
    first = cluster.servers[0]
    env = {
        **first._env,
        "MOTET_NATS_NAME": "stranger",
        "MOTET_NATS_CLUSTER": f"{HOST}:{free_port()}",
    }
    routes = first._env["MOTET_NATS_ROUTES"].replace("cluster:p", "cluster:q")
    stranger = NatsServer(
        CLUSTER_CONF, None, env=env | {"MOTET_NATS_ROUTES": routes}, tls=first._tls
    )
    async with stranger, cluster.bus("gateway") as bus:
        urls = {url.port for url in bus.frames.client.servers}  # type: ignore[attr-defined]
        await asyncio.sleep(2)
        assert stranger.port not in urls | {
            url.port
            for url in bus.frames.client.discovered_servers  # type: ignore[attr-defined]
        }
        lost = cluster.config("gateway")
        with pytest.raises(ConfigError):  # its passwords are others
            await Bus.connect(
                "gateway-1",
                ProcessConfig(
                    nats_url=f"tls://{HOST}:{stranger.port}",
                    nats_credentials=lost.nats_credentials,
                    metrics_port=-1,
                    peer_ca=lost.peer_ca,
                    peer_cert=lost.peer_cert,
                    peer_key=lost.peer_key,
                ),
            )
