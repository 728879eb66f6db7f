"""Hold the owner's blobs: a segment and its leases, safe to use from any thread.

Copies happen outside the lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from motet_shared.blobs.buffer import copy, digest_of
from motet_shared.blobs.lease import Lease, Leases
from motet_shared.blobs.shm import Segment
from motet_shared.blobs.tcp import Get
from motet_shared.errors import BlobError, Overloaded

_LOOK = 0.05  # seconds between checks for expired leases while a put waits for room


class PublishedBlobs:
    """Put blobs into `segment` and lend them out until their leases end."""

    def __init__(self, segment: Segment, capacity: int):
        self.segment = segment
        self._leases = Leases(capacity, segment.slots, segment.erase)
        self._freed = threading.Condition()

    def put(
        self,
        data: memoryview,
        readers: int | Collection[str],
        ttl: float,
        deadline: float,
        digest: bool,
    ) -> tuple[str, str]:
        """Copy `data` into the segment; return its key and digest.

        Blocks until `deadline` (monotonic) for room. Raises BlobError if the data can never fit,
        Overloaded if there was no room in time, or the system has no memory for it.
        """
        with self._freed:
            lease = self._reserve(len(data), readers, ttl, deadline)
            self._leases.pin(lease)
        try:
            self.segment.provide(lease.offset, lease.nbytes)
            copy(self.segment.view(lease.offset, lease.nbytes), data)
            computed = digest_of(data) if digest else ""
            with self._freed:
                self._publish(lease)
        except BaseException:
            with self._freed:
                self._leases.retire(lease)
            raise
        finally:
            with self._freed:
                self._leases.unpin(lease)
                self._freed.notify_all()
        return lease.key, computed

    def _reserve(
        self, nbytes: int, readers: int | Collection[str], ttl: float, deadline: float
    ) -> Lease:
        arena = self._leases.arena
        if nbytes > arena.capacity:
            raise BlobError(
                f"blob of {nbytes} bytes is larger than the store ({arena.capacity}); raise its capacity"
            )
        while True:
            now = time.monotonic()
            self._leases.expire(now)
            lease = self._leases.reserve(nbytes, readers, ttl, now)
            if lease is not None:
                return lease
            if now >= deadline:
                raise Overloaded(
                    f"blob store is full: {nbytes} bytes wanted, {arena.free_bytes} of {arena.capacity} free "
                    f"(largest gap {arena.largest_gap}), {len(self._leases)} of {self.segment.slots} blobs"
                )
            self._freed.wait(min(deadline - now, _LOOK))

    def _publish(self, lease: Lease) -> None:
        if self._leases.get(lease.key) is not lease:
            raise BlobError(
                "the lease was over before its bytes were written: its readers are gone, or the ttl is short"
            )
        lease.expires = time.monotonic() + lease.ttl
        self.segment.publish(lease.key, lease.offset, lease.nbytes)

    @contextmanager
    def lend(self, request: Get) -> Iterator[memoryview]:
        """Yield the bytes of a blob, read-only.

        They are not overwritten before the block ends, even if the lease does. Raises BlobError.
        """
        with self._freed:
            lease = self._claim(request.key, request.reader)
            if lease.nbytes != request.nbytes:
                raise BlobError(
                    f"blob {request.key} has {lease.nbytes} bytes, its reference says {request.nbytes}"
                )
            self._leases.pin(lease)
        try:
            yield self.segment.view(lease.offset, lease.nbytes).toreadonly()
        finally:
            with self._freed:
                self._leases.unpin(lease)
                self._freed.notify_all()

    def renew(self, key: str, reader: str) -> None:
        """Restart the ttl of a blob; raise BlobError if it is gone."""
        with self._freed:
            self._claim(key, reader)

    def _claim(self, key: str, reader: str) -> Lease:
        lease = self._leases.claim(key, reader, time.monotonic())
        if lease is None:
            raise BlobError(
                f"blob {key[:60]} is gone, or not for {reader[:60]}: released, expired, or never here"
            )
        return lease

    def release(self, keys: list[str], reader: str) -> None:
        """Mark `reader` as done with these blobs."""
        with self._freed:
            for key in keys:
                self._leases.release(key, reader)
            self._freed.notify_all()

    def drop(self, key: str) -> None:
        """End a lease regardless of its readers."""
        with self._freed:
            lease = self._leases.get(key)
            if lease is not None:
                self._leases.retire(lease)
                self._freed.notify_all()

    def forget(self, reader: str) -> None:
        """Release all leases of a dead reader."""
        with self._freed:
            self._leases.forget(reader)
            self._freed.notify_all()

    def expire(self) -> None:
        """Retire leases whose time is over."""
        with self._freed:
            self._leases.expire(time.monotonic())
            self._freed.notify_all()

    def stats(self) -> dict[str, int]:
        """Return blobs, bytes_used, bytes_capacity and expired."""
        with self._freed:
            arena = self._leases.arena
            return {
                "blobs": len(self._leases),
                "bytes_used": arena.capacity - arena.free_bytes,
                "bytes_capacity": arena.capacity,
                "expired": self._leases.expired,
            }

    def check_integrity(self) -> None:
        """Raise RuntimeError if bytes or slots were lost or are held twice."""
        with self._freed:
            self._leases.check_integrity()
