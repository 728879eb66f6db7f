"""NATS servers of one stack that are connected to each other, with what `motet credentials` makes."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from motet_cli.joining.certificates import make_authority, make_certificate
from motet_cli.joining.server_links import write_links
from motet_shared.peer_tls import peer_tls
from motet_shared.process.config import ProcessConfig
from motet_shared.testing import NATS_CONF, NatsServer, free_port
from motet_shared.wire.bus import Bus

HOST = "127.0.0.1"


class Credentials:
    """Hold the certificate that all servers share, and what they log in to each other with, below `folder`."""

    def __init__(self, folder: Path, routes: Sequence[int], leafnodes: Sequence[int]):
        make_authority(folder)
        cert, key = make_certificate(folder, [HOST], "host")
        self.files = {"peer_ca": folder / "ca.crt", "peer_cert": cert, "peer_key": key}
        self.folder = folder
        self.links = [[f"{HOST}:{port}" for port in ports] for ports in (routes, leafnodes)]
        write_links(folder, *self.links)
        tls = peer_tls(**self.files)
        assert tls is not None
        self.tls = tls.client

    def environment(self, name: str) -> dict[str, str]:
        files = {f"MOTET_{key.upper()}": str(path) for key, path in self.files.items()}
        return {**files, "MOTET_NATS_NAME": name, "MOTET_STORE_SIZE": "200MB"}

    def hub(self, store: Path, leafnodes: int) -> NatsServer:
        """Return the server of services/nats-hub.conf, which is not started."""
        env = self.environment("hub") | {"MOTET_NATS_LEAFNODES": f"{HOST}:{leafnodes}"}
        return self._server("nats-hub.conf", store, env, True)

    def member(self, name: str, store: Path | None, route: int) -> NatsServer:
        """Return a server of services/nats-cluster.conf."""
        env = self.environment(name) | {
            "MOTET_NATS_CLUSTER": f"{HOST}:{route}",
            "MOTET_NATS_LEAFNODES": f"{HOST}:{free_port()}",
        }
        return self._server("nats-cluster.conf", store, env, True)

    def leaf(self, name: str, hub: int | None = None) -> NatsServer:
        """Return a server of services/nats-leaf.conf. hub: port of another way to the hub."""
        server = self._server("nats-leaf.conf", None, self.environment(name), False)
        text = (self.folder / "leaf" / "hub.conf").read_text()
        if hub is not None:
            text = text.replace(self.links[1][0], f"{HOST}:{hub}")
        (server._folder / "server" / "hub.conf").write_text(text)
        return server

    def _server(
        self, config: str, store: Path | None, env: dict[str, str], tls: bool
    ) -> NatsServer:
        path = NATS_CONF.with_name(config)
        server = NatsServer(path, store, env=env, tls=self.tls if tls else None)
        for file in (self.folder / "server").iterdir():
            shutil.copy(file, server._folder / "server")
        return server

    @asynccontextmanager
    async def bus(self, role: str, *servers: NatsServer) -> AsyncIterator[Bus]:
        config = self.config(role, *servers)
        bus = await Bus.connect(config.instance_id(role), config)
        try:
            yield bus
        finally:
            await bus.close()

    def config(self, role: str, *servers: NatsServer) -> ProcessConfig:
        """Return settings of a process that connects to these servers."""
        tls = servers[0]._tls is not None
        scheme, given = ("tls", self.files) if tls else ("nats", {})
        settings: dict[str, Any] = dict(given)
        return ProcessConfig(
            nats_url=",".join(f"{scheme}://{HOST}:{server.port}" for server in servers),
            nats_credentials=servers[0].credentials,
            metrics_port=-1,
            **settings,
        )
