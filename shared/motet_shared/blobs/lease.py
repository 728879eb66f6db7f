"""Track which readers may read which bytes of a blob store.

This is pure bookkeeping without memory, sockets, clocks or locks. `Arena` allocates ranges of
bytes; `Leases` decides when a range is free again. Invariants: blocks never overlap, gaps are never
adjacent, and a block returns to the arena exactly once, after its slot was erased and no transfer
reads it any more.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

ALIGNMENT = 64  # bytes; a cache line


class Arena:
    """Allocate ranges of `capacity` bytes first-fit, which reuses warm pages at low offsets."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self._gaps = [(0, capacity)] if capacity else []  # (offset, size), sorted, never adjacent

    @property
    def free_bytes(self) -> int:
        """Return the total size of all gaps."""
        return sum(size for _, size in self._gaps)

    @property
    def largest_gap(self) -> int:
        """Return the size of the largest gap."""
        return max((size for _, size in self._gaps), default=0)

    def allocate(self, size: int) -> int | None:
        """Return the offset of `size` bytes (a multiple of ALIGNMENT), or None if no gap fits."""
        for i, (offset, gap) in enumerate(self._gaps):
            if gap >= size:
                self._gaps[i : i + 1] = [(offset + size, gap - size)] if gap > size else []
                return offset
        return None

    def free(self, offset: int, size: int) -> None:
        """Return a block to the arena and merge it with adjacent gaps."""
        i = bisect_left(self._gaps, (offset, 0))
        if i < len(self._gaps) and self._gaps[i][0] == offset + size:
            size += self._gaps.pop(i)[1]
        if i > 0 and sum(self._gaps[i - 1]) == offset:
            offset, size = self._gaps[i - 1][0], self._gaps[i - 1][1] + size
            i -= 1
            self._gaps.pop(i)
        self._gaps.insert(i, (offset, size))

    def check_integrity(self, blocks: Collection[tuple[int, int]]) -> None:
        """Raise RuntimeError unless `blocks` (offset, size) and the gaps tile the arena."""
        end, was_gap = 0, False
        for offset, size, is_gap in sorted(
            [(*b, False) for b in blocks] + [(*g, True) for g in self._gaps]
        ):
            if offset != end or size <= 0 or (is_gap and was_gap):
                raise RuntimeError(f"blob arena: span {offset}+{size} does not follow {end}")
            end, was_gap = offset + size, is_gap
        if end != self.capacity:
            raise RuntimeError(f"blob arena: spans end at {end}, not at {self.capacity}")


@dataclass(eq=False, slots=True)
class Lease:
    """Lease of a range of bytes to named or unnamed readers.

    `slot` is its place in the key table; `token` makes its key unguessable.
    """

    slot: int
    offset: int
    size: int  # reserved bytes, a multiple of ALIGNMENT
    nbytes: int  # requested bytes
    ttl: float  # seconds
    expires: float
    readers: set[str]  # instance ids of readers that are not done
    unnamed: int  # expected readers that are not known by name yet
    done: set[str] = field(default_factory=set)
    pins: int = 0  # transfers that are reading the bytes
    token: bytes = field(default_factory=lambda: secrets.token_bytes(16))

    @property
    def key(self) -> str:
        """Return the key of the blob: slot and token."""
        return f"{self.slot}-{self.token.hex()}"


class Leases:
    """Manage all leases of one store.

    `erase(slot)` is called before the range of a lease can be reused.
    """

    def __init__(self, capacity: int, slots: int, erase: Callable[[int], None]):
        self.arena = Arena(capacity // ALIGNMENT * ALIGNMENT)
        self.expired = 0
        self._erase = erase
        self._slots = list(range(slots - 1, -1, -1))
        self._by_key: dict[str, Lease] = {}
        self._leaving: set[Lease] = set()  # retired leases whose bytes a transfer still reads

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: str) -> Lease | None:
        """Return the active lease of a key, or None."""
        return self._by_key.get(key)

    def reserve(
        self, nbytes: int, readers: int | Collection[str], ttl: float, now: float
    ) -> Lease | None:
        """Reserve `nbytes` bytes for `readers` (names, or their number); None without room."""
        size = max(nbytes + -nbytes % ALIGNMENT, ALIGNMENT)
        offset = self.arena.allocate(size) if self._slots else None
        if offset is None:
            return None
        named = set() if isinstance(readers, int) else set(readers)
        unnamed = readers if isinstance(readers, int) else 0
        lease = Lease(self._slots.pop(), offset, size, nbytes, ttl, now + ttl, named, unnamed)
        self._by_key[lease.key] = lease
        return lease

    def claim(self, key: str, reader: str, now: float) -> Lease | None:
        """Restart the lease's ttl because `reader` is active; None if it has no part in it."""
        lease = self._by_key.get(key)
        if lease is None:
            return None
        if reader not in lease.readers:
            if reader in lease.done or lease.unnamed == 0:
                return None
            lease.unnamed -= 1
            lease.readers.add(reader)
        lease.expires = now + lease.ttl
        return lease

    def release(self, key: str, reader: str) -> None:
        """Mark `reader` as done.

        Repeated or late calls, and calls for instances without a part in the lease, have no effect.
        """
        lease = self._by_key.get(key)
        if lease is None or reader in lease.done:
            return
        if reader in lease.readers:
            lease.readers.remove(reader)
        elif lease.unnamed > 0:
            lease.unnamed -= 1
        else:
            return
        lease.done.add(reader)
        if not lease.readers and lease.unnamed == 0:
            self.retire(lease)

    def forget(self, reader: str) -> None:
        """Release all leases of a dead reader, both expected and claimed ones."""
        for key in [key for key, lease in self._by_key.items() if reader in lease.readers]:
            self.release(key, reader)

    def expire(self, now: float) -> None:
        """Retire all leases whose time is over."""
        for lease in [lease for lease in self._by_key.values() if lease.expires <= now]:
            self.expired += 1
            self.retire(lease)

    def retire(self, lease: Lease) -> None:
        """End a lease regardless of its readers.

        Its bytes are reused once no transfer reads them.
        """
        if self._by_key.pop(lease.key, None) is None:
            return
        self._erase(lease.slot)
        self._leaving.add(lease)
        self._settle(lease)

    def pin(self, lease: Lease) -> None:
        """Keep the lease's bytes from reuse during a transfer."""
        lease.pins += 1

    def unpin(self, lease: Lease) -> None:
        """End a transfer; free the bytes if the lease is over and this was the last transfer."""
        lease.pins -= 1
        self._settle(lease)

    def _settle(self, lease: Lease) -> None:
        if lease.pins == 0 and lease in self._leaving:
            self._leaving.remove(lease)
            self.arena.free(lease.offset, lease.size)
            self._slots.append(lease.slot)

    def check_integrity(self) -> None:
        """Raise RuntimeError if bytes or slots were lost or are held twice."""
        held = [*self._by_key.values(), *self._leaving]
        self.arena.check_integrity([(lease.offset, lease.size) for lease in held])
        slots = sorted([*self._slots, *(lease.slot for lease in held)])
        if slots != list(range(len(slots))):
            raise RuntimeError(f"blob leases: slots lost or held twice: {slots}")
