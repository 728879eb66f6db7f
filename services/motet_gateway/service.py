"""What all endpoints share: the bus, the settings, who may ask, how much at a time, and what is counted."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from motet_pipelines.models import check_known
from motet_shared.blobs import BlobStore
from motet_shared.bus import Bus
from motet_shared.errors import Draining
from motet_shared.telemetry import Metrics
from motet_shared.tenants import Tenants

from .auth import Door
from .buckets import Clock
from .config import GatewayConfig
from .limits import Limits
from .looks import Looks
from .metrics import GatewayMetrics
from .realtime.sessions import Sessions
from .tenants_file import TenantsFile

if TYPE_CHECKING:
    from .image_jobs import ImageJobs
    from .keep import Keep


class Service:
    """One per process. ConfigError for a file of tenants that cannot be used."""

    def __init__(self, config: GatewayConfig, bus: Bus, metrics: Metrics, clock: Clock = time.monotonic_ns):
        self.config = config
        self.bus = bus
        self.limits = Limits(config.max_streams)
        self.metrics = GatewayMetrics(metrics)
        self.looks = Looks(bus.directory)
        bus.monitor.duties.append(self.looks.tick)
        # What is changed while the door reads it is seen as a change.
        self.tenants_file = TenantsFile(path, self._use) if (path := config.tenants_file) is not None else None
        self.door = Door(config, self.limits, self.metrics, clock)
        self.metrics.streams.set_function(lambda: self.limits.active)
        self.sessions = Sessions(config.session_keep, config.max_kept_sessions)
        self.metrics.sockets.set_function(lambda: self.sessions.connected)
        self.keep: Keep | None = None  # where the server of NATS keeps something
        self.jobs: ImageJobs | None = None
        self._uploads: asyncio.Task[BlobStore] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    def watch(self) -> None:
        """From now on, follow what changes in the file of tenants."""
        if self.tenants_file is not None:
            self._watching = asyncio.create_task(self.tenants_file.watch(), name="tenants")

    def _use(self, tenants: Tenants) -> None:
        """Other tenants and keys. Whoever is in a session with a key that is no longer accepted has to leave."""
        self.door.use(tenants)
        for session in self.sessions:
            if not self.door.still_takes(session.caller):
                leaving = asyncio.create_task(session.expel("the API key is no longer accepted"), name="expel")
                self._leaving.add(leaving)
                leaving.add_done_callback(self._leaving.discard)

    def admit(self, model: str) -> None:
        """Before any work: Draining while stopping, UnknownModel or Unavailable if nobody can answer for `model`."""
        self.check_open()
        check_known(self.bus.directory, model)

    def check_open(self) -> None:
        """Draining while stopping."""
        if self.limits.draining:
            raise Draining("this server is stopping; try again in a moment")

    async def uploads(self) -> BlobStore:
        """Where files wait for the service that reads them. Made for the first one: a gateway may never see any."""
        if self._uploads is None or (self._uploads.done() and self._uploads.exception() is not None):
            store = BlobStore.of(self.config, self.bus.instance, self.config.upload_memory)
            self._uploads = asyncio.create_task(store.start(), name="uploads")
        return await asyncio.shield(self._uploads)

    async def open_keep(self) -> None:
        """Have pictures kept, and jobs drawn, where NATS can."""
        from .image_jobs import ImageJobs
        from .keep import Keep

        config = self.config
        self.keep = await Keep.open(self.bus, config.picture_ttl, config.job_ttl, config.job_patience)
        if self.keep is not None:
            self.jobs = ImageJobs(self.bus, self.keep, self.uploads, config.request_timeout)
            self.jobs.start(config.jobs)

    async def close(self) -> None:
        await self.sessions.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        if self.jobs is not None:
            await self.jobs.close()
        if self._uploads is not None:
            await asyncio.wait([self._uploads])
            if self._uploads.exception() is None:
                await self._uploads.result().close()
