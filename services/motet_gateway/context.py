"""Hold what all endpoints share: bus, settings, authentication, limits and metrics."""

from __future__ import annotations

import asyncio
import functools
import time
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, Request

from motet_gateway.audio.voice_store import VoiceStore
from motet_gateway.batches.queue import BatchQueue
from motet_gateway.batches.store import BatchStore
from motet_gateway.files.store import FileStore
from motet_gateway.http.connections.counts import ConnectionCounts
from motet_gateway.http.hosts import Hosts
from motet_gateway.idempotency.entries import Entries
from motet_gateway.images.jobs import ImageJobs
from motet_gateway.images.store import ImageStore
from motet_gateway.openai.aliases import CHAT, model_of
from motet_gateway.operations.heartbeat_history import HeartbeatHistory
from motet_gateway.operations.metrics import GatewayMetrics
from motet_gateway.operations.readiness import Readiness
from motet_gateway.realtime.sessions import Sessions
from motet_gateway.responses.store import ResponseStore
from motet_gateway.storage.counts import SharedCounts
from motet_gateway.storage.documents import NEVER, JetStreamDocuments
from motet_gateway.storage.jetstream import connect
from motet_gateway.storage.quota import Stored
from motet_gateway.storage.work_queue import WorkQueue
from motet_gateway.tenancy.auth import Authenticator
from motet_gateway.tenancy.buckets import Clock
from motet_gateway.tenancy.client_secrets import LONGEST, ClientSecrets
from motet_gateway.tenancy.concurrency import ConcurrencyLimits
from motet_gateway.tenancy.shared_bucket import Accounts
from motet_gateway.tenancy.tenant import Tenant
from motet_gateway.tenancy.tenant_sites import TenantSites
from motet_gateway.tenancy.tenants_file import TenantsFile
from motet_gateway.videos.jobs import VideoJobs
from motet_gateway.videos.store import VideoStore
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import Draining, Overloaded
from motet_shared.process.telemetry import Metrics
from motet_shared.tenants import Tenants
from motet_shared.wire import subjects
from motet_shared.wire.bus import Bus

from .config import GatewayConfig

if TYPE_CHECKING:
    from nats.aio.client import Client


class GatewayContext:
    """Hold the shared state of one gateway process.

    Raises ConfigError for a tenants file that cannot be used.
    """

    def __init__(
        self, config: GatewayConfig, bus: Bus, metrics: Metrics, clock: Clock = time.monotonic_ns
    ):
        self.config = config
        self.bus = bus
        bus.directory.presence.expect(config.expect)
        self.limits = ConcurrencyLimits(config.max_streams)
        self.metrics = GatewayMetrics(metrics)
        self.readiness = Readiness(bus, self.limits)
        self.heartbeats = HeartbeatHistory(bus.directory)
        bus.monitor.duties.append(self.heartbeats.tick)
        # Created before the authenticator reads the file, so that a change in between is noticed.
        self.tenants_file = (
            TenantsFile(path, self._use) if (path := config.tenants_file) is not None else None
        )
        self.connections = ConnectionCounts(
            config.max_connections,
            config.max_connections_per_address,
            config.trusted_proxies,
            self.metrics.refuse_connection,
        )
        self.metrics.connections.set_function(lambda: self.connections.total)
        self.hosts = Hosts(config.allowed_hosts, config.host)
        self.authenticator = Authenticator(config, self.limits, self.metrics.tenants, clock)
        self.tenant_sites = TenantSites(bus.site, self.authenticator.tenant)
        self.metrics.streams.set_function(lambda: self.limits.active)
        self.sessions: Sessions[Any] = Sessions(config.session_keep, config.max_kept_sessions)
        self.metrics.sockets.set_function(lambda: self.sessions.connected)
        self.calls: dict[str, Any] = {}  # over WebRTC, by id
        self.client_secrets = ClientSecrets(clock, self.sessions.has, self.authenticator.tenant)
        self.stored = Stored(lambda owner: self.authenticator.limits_of(owner).stored_bytes)
        self.store: ImageStore | None = None  # set if NATS has JetStream
        self.jobs: ImageJobs | None = None
        self.videos: VideoJobs | None = None
        self.responses: ResponseStore | None = None
        self.response_queue: WorkQueue | None = None
        self.files: FileStore | None = None
        self.voices: VoiceStore | None = None
        self.batches: BatchStore | None = None
        self.batch_queue: BatchQueue | None = None
        self.idempotency: Entries | None = None
        self.accounts: Accounts | None = None
        self.downloads = 0  # of models, for /api/pull
        self._uploads: asyncio.Task[BlobStore] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    def watch(self) -> None:
        """Start to follow changes of the tenants file, if there is one."""
        if self.tenants_file is not None:
            self._watching = asyncio.create_task(self.tenants_file.watch(), name="tenants")

    def _use(self, tenants: Tenants) -> None:
        """Apply changed tenants and keys.

        Sessions whose key is no longer accepted are closed.
        """
        self.authenticator.use(tenants)
        for session in self.sessions:
            if not self.authenticator.accepts(session.caller):
                leaving = asyncio.create_task(
                    session.expel("the API key is no longer accepted"), name="expel"
                )
                self._leaving.add(leaving)
                leaving.add_done_callback(self._leaving.discard)

    def admit(self, model: str) -> str:
        """Return the served chat model that `model` refers to, before any work is done for it.

        Raises Draining while stopping, and UnknownModel, WrongModelKind or Unavailable if the model
        cannot be used.
        """
        self.check_open()
        return model_of(self.bus.directory, CHAT, model)

    def check_room(self) -> None:
        """Raise Overloaded if as many sessions are open as may be."""
        connected = self.sessions.connected
        if connected >= self.config.max_sockets:
            raise Overloaded(
                f"{connected} sockets are open, the most allowed here; try again in a moment"
            )

    def check_open(self) -> None:
        """Raise Draining while the gateway is stopping."""
        if self.limits.draining:
            raise Draining("this server is stopping; try again in a moment")

    @functools.cached_property
    def _upload_store(self) -> BlobStore:
        return BlobStore.of(self.config, self.bus, self.config.upload_memory)

    async def uploads(self) -> BlobStore:
        """Return the blob store for files that other services read.

        It is created on first use, since many gateways never need it; a failed start is retried.
        """
        if self._uploads is None or (
            self._uploads.done() and self._uploads.exception() is not None
        ):
            self._uploads = asyncio.create_task(self._upload_store.start(), name="uploads")
        return await asyncio.shield(self._uploads)

    async def open_store(self) -> bool:
        """Open the stores, and run jobs; return False if NATS has no JetStream now.

        Nothing is used or started before all are open. Raises one of `ERRORS`.
        """
        client = await connect(self.bus)
        if client is None:
            return False
        config = self.config
        counts = await SharedCounts.open(client)
        images = await ImageStore.open(
            client, self.stored, config.picture_ttl, config.job_ttl, config.job_patience
        )
        responses = await self._queue(client, "motet_response_jobs", "respond", config.response_ttl)
        films = await self._queue(client, "motet_video_jobs", "film", config.video_ttl)
        self.batch_queue = await BatchQueue.open(client, config.file_ttl, config.job_patience)
        self.response_queue = responses
        self._share(counts)
        self._draw(images)
        self._film(client, films)
        documents = JetStreamDocuments(client, "motet_responses", config.response_ttl)
        self.responses = ResponseStore(documents, self.stored)
        documents = JetStreamDocuments(client, "motet_files", config.file_ttl)
        self.files = FileStore(documents, self.stored, config.file_ttl)
        self.batches = BatchStore(documents)
        self.voices = VoiceStore(JetStreamDocuments(client, "motet_voices", NEVER), self.stored)
        self.client_secrets.documents = JetStreamDocuments(client, "motet_client_secrets", LONGEST)
        documents = JetStreamDocuments(client, "motet_idempotency", config.idempotency_ttl)
        self.idempotency = Entries(documents, self.stored)
        return True

    async def _queue(self, client: Client, stream: str, work: str, ttl: float) -> WorkQueue:
        """Open the queue of one kind of work. `ttl`: seconds."""
        patience = self.config.job_patience
        return await WorkQueue.open(
            client, stream, subjects.jobs(work), consumer=work, ttl=ttl, patience=patience
        )

    def _share(self, counts: SharedCounts) -> None:
        self.accounts = Accounts(counts, self.metrics.tenants, self.bus.instance)
        self.authenticator.share(self.accounts)
        self.accounts.start()

    def _draw(self, store: ImageStore) -> None:
        self.store = store
        timeout = self.config.request_timeout
        self.jobs = ImageJobs(self.bus, store, self.uploads, timeout, self.tenant_sites)
        self.jobs.start(self.config.jobs)

    def _film(self, client: Client, queue: WorkQueue) -> None:
        config = self.config
        documents = JetStreamDocuments(client, "motet_videos", config.video_ttl)
        store = VideoStore(documents, self.stored, config.video_ttl)
        self.videos = VideoJobs(
            self.bus, store, queue, self.uploads, config.video_timeout, self.tenant_sites
        )
        self.videos.start(config.videos)

    async def close(self) -> None:
        """Close sessions, stop the tenants watch and jobs, and close the blob store."""
        await self.sessions.close()
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        for jobs in (self.jobs, self.videos):
            if jobs is not None:
                await jobs.close()
        if self.accounts is not None:
            await self.accounts.close()
        if self._uploads is not None:
            await asyncio.wait([self._uploads])
            if self._uploads.exception() is None:
                await self._uploads.result().close()


async def _service_of(request: Request) -> GatewayContext:
    service: GatewayContext = request.app.state.service
    return service


async def _tenant_of(request: Request) -> Tenant:
    tenant: Tenant = request.state.tenant
    return tenant


# Parameters of FastAPI endpoints. A public endpoint has no caller.
Service = Annotated[GatewayContext, Depends(_service_of)]
CallingTenant = Annotated[Tenant, Depends(_tenant_of)]
