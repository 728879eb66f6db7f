"""Transfer bulk bytes out of band: messages carry a `BlobRef`, the bytes bypass NATS.

    async with BlobStore("encoder-1", capacity=256 << 20) as store:       # the owner
        ref = store.put(data, "float32", (256, 1024), readers=["decode-1"])
    ...                                                                   # ref travels over NATS
    data = await store.get(ref)                                           # the reader's own store

Bytes move through shared memory if owner and reader share /dev/shm, else over TCP, transparently
for callers. A blob lives until all its readers have released it (`get` does), are reported dead
(`forget`), or let its ttl pass without `renew`. Published bytes outlive their owner until they are
swept: reading a dead owner's blob gives the whole blob or a BlobError.

Modules: `blobs.lease` decides on lifetimes, `blobs.shm` maps memory, `blobs.published` joins the two
for the owner, `blobs.tcp` and `blobs.server` transfer, `blobs.buffer` copies.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from motet_shared.blobs import shm as blobs_shm
from motet_shared.blobs.buffer import check_shape, digest_of, flat, fresh, target
from motet_shared.blobs.published import PublishedBlobs
from motet_shared.blobs.server import BlobServer
from motet_shared.blobs.shm import SHM, AttachFailed, Segment
from motet_shared.blobs.tcp import MAX_KEYS, BlobClient, Get, Release, Renew
from motet_shared.errors import BlobError, MotetError
from motet_shared.messages import BlobRef
from motet_shared.peer_tls import PeerTls
from motet_shared.process.config import ProcessConfig
from motet_shared.wire.bus import Bus

__all__ = ["BlobStore", "sweep"]

T = TypeVar("T")
sweep = blobs_shm.sweep
_INLINE = 256 << 10  # smaller copies are faster than a thread hop
_EXPIRE_EVERY = 0.25  # seconds
_MAPPINGS = 64  # maximum number of other owners' segments that stay mapped


class BlobStore:
    """Store and read blobs of one process; use it from one event loop, `put` from any thread.

    `capacity`: bytes for its own blobs; 0: read only. `shared=False` keeps them out of /dev/shm, so
    that readers use TCP. `ttl`, seconds: how long a blob waits for its readers. `patience`,
    seconds: how long a silent connection is kept. `largest`: references to more bytes are refused.
    `advertise`: host name at which other hosts reach `host`. `tls`: TCP is encrypted, and both
    sides present a certificate of the stack's CA.
    """

    def __init__(
        self,
        instance: str,
        capacity: int = 0,
        *,
        ttl: float = 30.0,
        slots: int = 4096,
        shared: bool = True,
        folder: Path = SHM,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        patience: float = 10.0,
        largest: int = 4 << 30,
        tls: PeerTls | None = None,
    ):
        self.instance, self.capacity, self.ttl, self.largest = instance, capacity, ttl, largest
        self.address = ""  # host:port of this store's server, once started
        self.lost_releases = 0  # releases that did not reach the owner; the ttl frees those blobs
        self._slots, self._folder, self._shared = slots, folder, shared
        self._host, self._port, self._advertise, self._patience = host, port, advertise, patience
        self._tls = tls
        self._client = BlobClient(patience=patience, tls=None if tls is None else tls.client)
        self._published: PublishedBlobs | None = None
        self._mappings: OrderedDict[str, Segment] = OrderedDict()
        self._pending: dict[str, list[str]] = {}  # address → keys to release
        self._tasks: set[asyncio.Task[None]] = set()
        # Two pools: puts that wait for room must not block reads.
        self._readers = ThreadPoolExecutor(2, f"{instance}-blob-read")
        self._writers = ThreadPoolExecutor(2, f"{instance}-blob-write")

    # ------------------------------------------------------------------------------------ lifecycle
    @classmethod
    def of(cls, config: ProcessConfig, bus: Bus, capacity: int = 0) -> BlobStore:
        """Return the store of a process, reachable as configured.

        It forgets instances that are gone. Raises ConfigError for wrong certificates.
        """
        store = cls(
            bus.instance,
            capacity,
            host=config.blob_host,
            advertise=config.blob_name,
            tls=config.peer_tls(),
        )
        bus.directory.on_gone.append(store.forget)
        return store

    async def start(self) -> BlobStore:
        """Sweep segments of dead processes, create the segment, and listen.

        Raises BlobError, for example if there is too little memory.
        """
        if self.capacity <= 0:
            return self
        await asyncio.to_thread(sweep, (), self._folder)
        folder = self._folder if self._shared else None
        segment = await asyncio.to_thread(
            Segment.create, self.instance, self.capacity, self._slots, folder
        )
        self._published = PublishedBlobs(segment, self.capacity)
        tls = None if self._tls is None else self._tls.server
        self._server = BlobServer(self._published, patience=self._patience, tls=tls)
        try:
            port = await self._server.start(self._host, self._port)
        except BlobError:
            segment.close()
            raise
        self.address = f"{self._advertise or _reachable(self._host)}:{port}"
        self._spawn(self._expire_forever(self._published))
        return self

    async def close(self) -> None:
        """Free everything; reads of this store's blobs by other processes end in a BlobError.

        A store that was not started may be closed too.
        """
        await asyncio.sleep(0)  # releases that were just queued get their first step
        releasing = [task for task in self._tasks if task.get_name() == "blob-release"]
        if releasing:
            await asyncio.wait(releasing, timeout=1.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._client.close()
        if self._published is not None:
            await self._server.close()
        for pool in (self._readers, self._writers):
            await asyncio.to_thread(pool.shutdown, cancel_futures=True)
        self._mappings.clear()
        if self._published is not None:
            self._published.segment.close()

    async def __aenter__(self) -> BlobStore:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---------------------------------------------------------------------------------------- owner
    def put(
        self,
        data: Any,
        dtype: str = "uint8",
        shape: Sequence[int] = (),
        *,
        digest: bool = True,
        readers: int | Collection[str] = 1,
        ttl: float | None = None,
        wait: float = 0.0,
    ) -> BlobRef:
        """Copy `data` (any C-contiguous buffer) into the store, to be read by `readers`.

        `readers` are instance ids, whose leases `forget` ends at once, or a number; then a reader
        that died before it claimed the blob is detected by the ttl only. Blocks up to `wait`
        seconds for room: do not call it with a wait on the event loop, use `put_async`. Raises
        Overloaded if the store is full, BlobError for data that can never be stored.
        """
        published = self._own_blobs()
        source = flat(data)
        check_shape(dtype, shape, len(source))
        if not readers or (isinstance(readers, int) and readers < 0):
            raise BlobError(f"readers: {readers!r}; a blob needs at least one")
        key, computed = published.put(
            source, readers, self.ttl if ttl is None else ttl, time.monotonic() + wait, digest
        )
        transport, address = (
            ("shm", published.segment.name) if self._shared else ("tcp", self.address)
        )
        return BlobRef(
            transport=transport,  # type: ignore[arg-type]
            address=address,
            key=key,
            nbytes=len(source),
            dtype=dtype,
            shape=tuple(shape),
            digest=computed,
            fallback=self.address,
            owner=self.instance,
        )

    async def put_async(
        self,
        data: Any,
        dtype: str = "uint8",
        shape: Sequence[int] = (),
        *,
        wait: float = 1.0,
        **options: Any,
    ) -> BlobRef:
        """Call `put` on a thread.

        If cancelled, the put still completes before this returns, and the blob is dropped.
        """
        call = partial(self.put, data, dtype, shape, wait=wait, **options)
        future = asyncio.get_running_loop().run_in_executor(self._writers, call)
        try:
            await _ended(future)
        except asyncio.CancelledError:
            if not future.cancelled() and future.exception() is None:
                self.drop(future.result())
            raise
        return future.result()

    def drop(self, ref: BlobRef) -> None:
        """Free an own blob regardless of its readers: they get a BlobError, never other bytes."""
        self._own_blobs().drop(ref.key)

    def _own_blobs(self) -> PublishedBlobs:
        if self._published is None:
            raise BlobError(
                f"{self.instance} has no room for blobs; give its store a capacity, and start it"
            )
        return self._published

    # --------------------------------------------------------------------------------------- reader
    async def get(self, ref: BlobRef, into: Any = None, *, release: bool = True) -> memoryview:
        """Return a copy of the bytes of `ref`, in `into` (a writable buffer) or in new memory.

        Reusing a large buffer is several times faster than new memory. The blob is released
        afterwards unless `release` is False; after an error it is not released, so that the caller
        may retry or `release` it. Raises BlobError (gone, wrong size, wrong digest, owner
        unreachable) and Overloaded (owner too busy).
        """
        if not 0 <= ref.nbytes <= self.largest:
            raise BlobError(
                f"blob {ref.key[:60]} claims {ref.nbytes} bytes; the limit is {self.largest}"
            )
        check_shape(ref.dtype, ref.shape, ref.nbytes)
        copied = fresh(ref.nbytes) if into is None else target(into, ref.nbytes)
        segment = self._attach(ref)
        if segment is not None:
            await self._in_thread(ref.nbytes, partial(segment.read, ref.key, copied))
        else:
            await self._client.fetch(_server(ref), Get(ref.key, ref.nbytes, self.instance), copied)
        if (
            ref.digest
            and await self._in_thread(ref.nbytes, partial(digest_of, copied)) != ref.digest
        ):
            raise BlobError(
                f"blob {ref.key} of {ref.owner}: its {ref.nbytes} bytes do not match their digest"
            )
        if release:
            self.release(ref)
        return copied

    def release(self, ref: BlobRef) -> None:
        """Release `ref`, read or not.

        Its owner is notified in the background, with many keys in one message.
        """
        address = ref.fallback or (ref.address if ref.transport == "tcp" else "")
        if self._published is not None and ref.owner == self.instance:
            self._published.release([ref.key], self.instance)
        elif address in self._pending:
            self._pending[address].append(ref.key)
        elif address:
            self._pending[address] = [ref.key]
            self._spawn(self._notify_released(address), "blob-release")

    async def renew(self, ref: BlobRef) -> None:
        """Restart the ttl of `ref`, which is still to be read; raise BlobError if it is gone."""
        if self._published is not None and ref.owner == self.instance:
            self._published.renew(ref.key, self.instance)
        else:
            await self._client.notify(_server(ref), Renew(ref.key, self.instance))

    def _attach(self, ref: BlobRef) -> Segment | None:
        """Return the segment that holds `ref`; None if its bytes must come over TCP.

        Raises AttachFailed if there is no TCP fallback, BlobError for an unknown transport.
        """
        if ref.transport == "tcp":
            return None
        if ref.transport != "shm":
            raise BlobError(
                f"blob {ref.key[:60]}: unknown transport {ref.transport!r}; known are shm and tcp"
            )
        segment = self._mappings.get(ref.address)
        if segment is None:
            try:
                segment = Segment.attach(ref.address, self._folder)
            except AttachFailed:
                if not ref.fallback:
                    raise
                return None
            self._mappings[ref.address] = segment
            if len(self._mappings) > _MAPPINGS:
                # Not closed, since a thread may be reading; unmapped with its last user.
                self._mappings.popitem(last=False)
        self._mappings.move_to_end(ref.address)
        return segment

    async def _in_thread(self, nbytes: int, work: Callable[[], T]) -> T:
        """Run `work`, on a thread if it is long.

        Even if cancelled, more than once, it waits for the end of `work`, which writes to the caller's memory.
        """
        if nbytes <= _INLINE:
            return work()
        future = asyncio.get_running_loop().run_in_executor(self._readers, work)
        await _ended(future)
        return future.result()

    async def _notify_released(self, address: str) -> None:
        pending = self._pending[address]
        try:
            while pending:
                keys = pending[:MAX_KEYS]
                try:
                    await self._client.notify(address, Release(keys, self.instance))
                except MotetError:
                    self.lost_releases += len(keys)
                del pending[: len(keys)]
        finally:
            del self._pending[address]

    # ----------------------------------------------------------------------------------------- both
    def forget(self, instance: str) -> None:
        """End a dead instance's leases on this store's blobs, and unmap its segments."""
        if self._published is not None:
            self._published.forget(instance)
        for name in [name for name in self._mappings if blobs_shm.owner_of(name) == instance]:
            del self._mappings[name]

    def stats(self) -> dict[str, int]:
        """Return counters: blobs, bytes_used, bytes_capacity, expired, connections, refused.

        As a reader: mapped, lost_releases.
        """
        stats = {"mapped": len(self._mappings), "lost_releases": self.lost_releases}
        if self._published is not None:
            stats |= self._published.stats()
            stats |= {"connections": self._server.open_connections, "refused": self._server.refused}
        return stats

    def check_integrity(self) -> None:
        """Raise RuntimeError if bytes were lost or are held twice."""
        if self._published is not None:
            self._published.check_integrity()

    def _spawn(self, work: Any, name: str | None = None) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _expire_forever(self, published: PublishedBlobs) -> None:
        while True:
            await asyncio.sleep(_EXPIRE_EVERY)
            published.expire()


async def _ended(future: asyncio.Future[Any]) -> None:
    """Wait until `future` has ended, even if cancelled, more than once; raises CancelledError then."""
    is_cancelled = False
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            is_cancelled = True
    if is_cancelled:
        if not future.cancelled():
            future.exception()  # known: else asyncio would log it
        raise asyncio.CancelledError


def _server(ref: BlobRef) -> str:
    return ref.address if ref.transport == "tcp" else ref.fallback


def _reachable(host: str) -> str:
    """Return the address at which others reach a listener on `host`.

    For a wildcard address, containers resolve their own host name.
    """
    return socket.gethostbyname(socket.gethostname()) if host in ("0.0.0.0", "::") else host
