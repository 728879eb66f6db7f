"""Bulk bytes out of band: tensors, KV blocks, images and files travel as a `BlobRef`, their bytes beside NATS.

    async with BlobStore("vision-1", capacity=256 << 20) as store:       # the owner
        ref = store.put(data, "float32", (256, 1024), readers=["decode-1"])
    ...                                                                   # ref travels over NATS
    data = await store.get(ref)                                           # the reader, a store of its own

Bytes go through shared memory where owner and reader share /dev/shm, else over TCP; callers do not notice. A blob
lives until all its readers have released it (`get` does), are reported dead (`forget`), or let its ttl pass without
`renew`. Published bytes outlive their owner until somebody sweeps: a dead owner's blob is whole, or a BlobError.

One noun per file: `blobs_lease` decides, `blobs_shm` maps, `blobs_shelf` joins the two for the owner, `blobs_tcp` and
`blobs_server` carry, `blobs_buffer` copies.
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

from motet_shared import blobs_shm
from motet_shared.blobs_buffer import check_shape, digest_of, flat, fresh, target
from motet_shared.blobs_server import BlobServer
from motet_shared.blobs_shelf import Shelf
from motet_shared.blobs_shm import SHM, AttachFailed, Segment
from motet_shared.blobs_tcp import MAX_KEYS, BlobClient, Get, Release, Renew
from motet_shared.config import ProcessConfig
from motet_shared.errors import BlobError, MotetError
from motet_shared.messages import BlobRef

__all__ = ["BlobStore", "sweep"]

T = TypeVar("T")
sweep = blobs_shm.sweep
_INLINE = 256 << 10  # smaller copies are quicker than a hop to a thread and back
_EXPIRE_EVERY = 0.25  # seconds
_MAPPINGS = 64  # segments of others that stay mapped


class BlobStore:
    """One process's blobs, its own and others'. Use it from one event loop; `put` from any thread.

    `capacity` bytes for its own blobs (0: it only reads); `shared=False` keeps them out of /dev/shm, so that readers
    come over TCP. `ttl` and `patience` are seconds: how long a blob waits for its readers, and how long a silent
    connection is borne. `largest`: references to more bytes than this are refused. `advertise` is the host name that
    others reach `host` by.
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
    ):
        self.instance, self.capacity, self.ttl, self.largest = instance, capacity, ttl, largest
        self.address = ""  # host:port of our server, once started
        self.lost_releases = 0  # that their owner did not hear of; the ttl frees those blobs
        self._slots, self._folder, self._shared = slots, folder, shared
        self._host, self._port, self._advertise, self._patience = host, port, advertise, patience
        self._client = BlobClient(patience=patience)
        self._shelf: Shelf | None = None
        self._mappings: OrderedDict[str, Segment] = OrderedDict()
        self._pending: dict[str, list[str]] = {}  # address → keys that we are done with
        self._tasks: set[asyncio.Task[None]] = set()
        # Two pools: puts that wait for room must not hold up the reads of others.
        self._readers = ThreadPoolExecutor(2, f"{instance}-blob-read")
        self._writers = ThreadPoolExecutor(2, f"{instance}-blob-write")

    # ------------------------------------------------------------------------------------------------------ lifecycle
    @classmethod
    def of(cls, config: ProcessConfig, instance: str, capacity: int) -> BlobStore:
        """A store that others reach as `config` says."""
        return cls(instance, capacity, host=config.blob_host, advertise=config.blob_name)

    async def start(self) -> BlobStore:
        """Sweep what dead processes left, make the segment, listen. Raises BlobError, e.g. for too little memory."""
        if self.capacity <= 0:
            return self
        await asyncio.to_thread(sweep, (), self._folder)
        folder = self._folder if self._shared else None
        segment = await asyncio.to_thread(Segment.create, self.instance, self.capacity, self._slots, folder)
        self._shelf = Shelf(segment, self.capacity)
        self._server = BlobServer(self._shelf, patience=self._patience)
        try:
            port = await self._server.start(self._host, self._port)
        except BlobError:
            segment.close()
            raise
        self.address = f"{self._advertise or _reachable(self._host)}:{port}"
        self._spawn(self._expire_forever(self._shelf))
        return self

    async def close(self) -> None:
        """Free everything; what others still read of ours ends in a BlobError. One that was not started closes too."""
        await asyncio.sleep(0)  # releases that were just queued get their first step
        releasing = [task for task in self._tasks if task.get_name() == "blob-release"]
        if releasing:
            await asyncio.wait(releasing, timeout=1.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._client.close()
        if self._shelf is not None:
            await self._server.close()
        for pool in (self._readers, self._writers):
            await asyncio.to_thread(pool.shutdown, cancel_futures=True)
        self._mappings.clear()
        if self._shelf is not None:
            self._shelf.segment.close()

    async def __aenter__(self) -> BlobStore:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ---------------------------------------------------------------------------------------------------------- owner
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
        """Copy `data` (anything with a C-contiguous buffer) into the store, to be read by `readers`.

        `readers` are instance ids, whose leases `forget` ends at once, or a number, where only the ttl tells of a
        reader that died before it came. Blocks up to `wait` seconds for room: not on the event loop (`put_async`).
        Raises Overloaded when the store is full, BlobError for what can never be stored.
        """
        shelf = self._own_shelf()
        source = flat(data)
        check_shape(dtype, shape, len(source))
        if not readers or (isinstance(readers, int) and readers < 0):
            raise BlobError(f"readers: {readers!r}; a blob needs at least one")
        key, computed = shelf.put(source, readers, self.ttl if ttl is None else ttl, time.monotonic() + wait, digest)
        transport, address = ("shm", shelf.segment.name) if self._shared else ("tcp", self.address)
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
        self, data: Any, dtype: str = "uint8", shape: Sequence[int] = (), *, wait: float = 1.0, **options: Any
    ) -> BlobRef:
        """`put` on a thread. If cancelled, it still ends before this returns, and the blob is dropped."""
        call = partial(self.put, data, dtype, shape, wait=wait, **options)
        future = asyncio.get_running_loop().run_in_executor(self._writers, call)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            if not future.cancelled() and future.exception() is None:
                self.drop(future.result())
            raise

    def drop(self, ref: BlobRef) -> None:
        """Free a blob of ours, whoever still reads it: those get a BlobError, never other bytes."""
        self._own_shelf().drop(ref.key)

    def _own_shelf(self) -> Shelf:
        if self._shelf is None:
            raise BlobError(f"{self.instance} has no room for blobs; give its store a capacity, and start it")
        return self._shelf

    # --------------------------------------------------------------------------------------------------------- reader
    async def get(self, ref: BlobRef, into: Any = None, *, release: bool = True) -> memoryview:
        """The bytes of `ref`: a copy of the caller's own, in `into` (a writable buffer) or in new memory.

        A large buffer that is used again is several times faster than new memory. Afterwards the blob is released,
        unless told otherwise; after an error it is not, so that the caller may try again or `release`.
        Raises BlobError (gone, wrong size, wrong digest, owner out of reach) and Overloaded (owner too busy).
        """
        if not 0 <= ref.nbytes <= self.largest:
            raise BlobError(f"blob {ref.key[:60]} claims {ref.nbytes} bytes; the limit is {self.largest}")
        check_shape(ref.dtype, ref.shape, ref.nbytes)
        copied = fresh(ref.nbytes) if into is None else target(into, ref.nbytes)
        segment = self._attach(ref)
        if segment is not None:
            await self._in_thread(ref.nbytes, partial(segment.read, ref.key, copied))
        else:
            await self._client.fetch(_server(ref), Get(ref.key, ref.nbytes, self.instance), copied)
        if ref.digest and await self._in_thread(ref.nbytes, partial(digest_of, copied)) != ref.digest:
            raise BlobError(f"blob {ref.key} of {ref.owner}: its {ref.nbytes} bytes do not match their digest")
        if release:
            self.release(ref)
        return copied

    def release(self, ref: BlobRef) -> None:
        """We are done with `ref`, read or not. Its owner is told in the background, many keys in one message."""
        address = ref.fallback or (ref.address if ref.transport == "tcp" else "")
        if self._shelf is not None and ref.owner == self.instance:
            self._shelf.release([ref.key], self.instance)
        elif address in self._pending:
            self._pending[address].append(ref.key)
        elif address:
            self._pending[address] = [ref.key]
            self._spawn(self._tell_released(address), "blob-release")

    async def renew(self, ref: BlobRef) -> None:
        """Start the ttl of `ref` anew: we still mean to read it. Raises BlobError if it is gone."""
        if self._shelf is not None and ref.owner == self.instance:
            self._shelf.renew(ref.key, self.instance)
        else:
            await self._client.tell(_server(ref), Renew(ref.key, self.instance))

    def _attach(self, ref: BlobRef) -> Segment | None:
        """The segment that holds `ref`; None if its bytes must come over TCP."""
        if ref.transport == "tcp":
            return None
        if ref.transport != "shm":
            raise BlobError(f"blob {ref.key[:60]}: unknown transport {ref.transport!r}; known are shm and tcp")
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
                self._mappings.popitem(last=False)  # not closed: a thread may be reading; unmapped with its last user
        self._mappings.move_to_end(ref.address)
        return segment

    async def _in_thread(self, nbytes: int, work: Callable[[], T]) -> T:
        """`work`, on a thread if it is long. Even if cancelled it ends first: it writes to the caller's memory."""
        if nbytes <= _INLINE:
            return work()
        future = asyncio.get_running_loop().run_in_executor(self._readers, work)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise

    async def _tell_released(self, address: str) -> None:
        pending = self._pending[address]
        try:
            while pending:
                keys = pending[:MAX_KEYS]
                try:
                    await self._client.tell(address, Release(keys, self.instance))
                except MotetError:
                    self.lost_releases += len(keys)
                del pending[: len(keys)]
        finally:
            del self._pending[address]

    # ----------------------------------------------------------------------------------------------------------- both
    def forget(self, instance: str) -> None:
        """`instance` is dead: end its leases on our blobs, unmap its segments."""
        if self._shelf is not None:
            self._shelf.forget(instance)
        for name in [name for name in self._mappings if blobs_shm.owner_of(name) == instance]:
            del self._mappings[name]

    def stats(self) -> dict[str, int]:
        """blobs, bytes_used, bytes_capacity, expired, connections, refused; as a reader mapped, lost_releases."""
        stats = {"mapped": len(self._mappings), "lost_releases": self.lost_releases}
        if self._shelf is not None:
            stats |= self._shelf.stats()
            stats |= {"connections": self._server.open_connections, "refused": self._server.refused}
        return stats

    def check_integrity(self) -> None:
        """Raise RuntimeError if bytes were lost or are held twice."""
        if self._shelf is not None:
            self._shelf.check_integrity()

    def _spawn(self, work: Any, name: str | None = None) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _expire_forever(self, shelf: Shelf) -> None:
        while True:
            await asyncio.sleep(_EXPIRE_EVERY)
            shelf.expire()


def _server(ref: BlobRef) -> str:
    return ref.address if ref.transport == "tcp" else ref.fallback


def _reachable(host: str) -> str:
    """How others call us when we listen on `host`; containers find their own address under their host name."""
    return socket.gethostbyname(socket.gethostname()) if host in ("0.0.0.0", "::") else host
