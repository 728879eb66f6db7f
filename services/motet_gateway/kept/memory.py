"""Lay out the memory of one connection: what came from its client, what was rendered for it, and the journal.

The memory is a memfd, of which the descriptor store has a duplicate. A process may die between any
two instructions, so each change is one store of eight bytes: the state lies in two slots, of which
the one that is not in use is written before it is put in use. Each area has two halves likewise: a
checkpoint is written into those that are not in use. Pages that are not used take no room.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import struct
from collections.abc import Iterable
from dataclasses import dataclass

MAGIC = int.from_bytes(b"MtFront\x04", "little")  # the last byte is the version of the layout
_MIB = 2**20
_IN_SIZE = _OUT_SIZE = _JOURNAL_SIZE = 64 * _MIB
_IN_AT = (4096, 4096 + _IN_SIZE)  # of both halves
_OUT_AT = (_IN_AT[1] + _IN_SIZE, _IN_AT[1] + _IN_SIZE + _OUT_SIZE)
_JOURNAL_AT = (_OUT_AT[1] + _OUT_SIZE, _OUT_AT[1] + _OUT_SIZE + _JOURNAL_SIZE)
SIZE = _JOURNAL_AT[1] + _JOURNAL_SIZE

_HEAD = struct.Struct("<Q32sQQ")  # magic, secret, bytes read and taken before the first of ours
_SLOT_WORD = 7  # of 8 bytes: the slot in use
_JOURNAL_WORD = 8  # generation << 32 | bytes of the journal
_SLOTS_AT = (128, 256)
_SLOT = struct.Struct("<11Q")
_RECORD = struct.Struct("<IHH")  # bytes, kind, stream

_OPEN, _ANSWERED, _JOURNALED, _SOCKET, _LASTING, _AWAY = 1, 2, 4, 8, 16, 32  # flags
_COMPACT = 256 * 1024  # bytes of a half from which on its unsent rest is moved to the other
_RETURNED = 256 * 1024  # bytes of a request from which on its pages are given back
READ = 64 * 1024  # bytes to read at a time
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class BadMemory(Exception):
    """Signal memory that is not of this layout, or full."""


@dataclass(slots=True)
class State:
    """The state of a connection that is put in use as a whole.

    A write is known by the journal records consumed before it (`cursor`) and its number since the
    last of them (`writes`); behind a WebSocket, `writes` is the number of events that were rendered.
    `generation` counts the times that all requests were answered, or a checkpoint replaced the journal,
    which begins with `checkpoint` bytes of it then. `half`: of received bytes and journal. `received`:
    bytes in memory once the client is away, when the kernel counts no more.
    """

    generation: int = 1
    in_base: int = 0  # bytes received before those in memory
    out_base: int = 0  # bytes rendered before those in memory
    out_half: int = 0
    out_len: int = 0
    cursor: int = 0
    writes: int = 0
    flags: int = 0
    half: int = 0
    checkpoint: int = 0
    received: int = 0


class ConnectionMemory:
    """The memory of one connection, of a new one or of one that another process has served."""

    def __init__(self, fd: int):
        self.fd = fd
        self._map = mmap.mmap(fd, SIZE)
        self._view = memoryview(self._map)
        self._words = self._view[:4096].cast("Q")
        self.state = State()
        self.in_len = 0
        self._journal_len = 0
        self.secret = b""
        self.bases = (0, 0)  # bytes read and taken before the first of ours

    @classmethod
    def create(cls, consumed: int, taken: int) -> ConnectionMemory:
        """Return new memory of a connection with these counts of the kernel. Raises OSError."""
        fd = os.memfd_create("motet-connection", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, SIZE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            made = cls(fd)
        except BaseException:
            os.close(fd)
            raise
        made.secret, made.bases = secrets.token_bytes(32), (consumed, taken)
        _HEAD.pack_into(made._map, 0, MAGIC, made.secret, consumed, taken)
        made.commit()
        return made

    @classmethod
    def adopt(cls, fd: int, consumed: int, taken: int) -> ConnectionMemory:
        """Return the memory that another process has written, with the counts of now.

        The counts do not matter if its client is away.

        Raises BadMemory unless it is complete and fits the counts; `fd` is then still the caller's.
        """
        if os.fstat(fd).st_size != SIZE or fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise BadMemory("not memory of a connection")
        found = cls(fd)
        try:
            found._restore(consumed, taken)
        except BaseException:
            found.release()
            raise
        return found

    def _restore(self, consumed: int, taken: int) -> None:
        magic, self.secret, *bases = _HEAD.unpack_from(self._map, 0)
        slot = self._words[_SLOT_WORD]
        if magic != MAGIC or slot > 1:
            raise BadMemory(f"layout {magic:x}; this is {MAGIC:x}")
        self.bases = (bases[0], bases[1])
        self.state = state = State(*_SLOT.unpack_from(self._map, _SLOTS_AT[slot]))
        self.in_len = consumed - self.bases[0] - state.in_base
        sent = taken - self.bases[1] - state.out_base
        if self.is_away:
            self.in_len, sent = state.received, state.out_len
        generation, length = divmod(self._words[_JOURNAL_WORD], 2**32)
        is_current = generation == state.generation
        self._journal_len = length if is_current else state.checkpoint
        if not (
            0 <= self.in_len <= _IN_SIZE
            and 0 <= sent <= state.out_len <= _OUT_SIZE
            and state.out_half <= 1
            and state.half <= 1
            and self._journal_len <= _JOURNAL_SIZE
        ):
            raise BadMemory("its state contradicts the kernel's counts")
        self._sent = sent
        self.records()

    def unsent(self) -> bytes:
        """Return the rendered bytes that the kernel has not taken, in adopted memory."""
        at = _OUT_AT[self.state.out_half]
        return self._map[at + self._sent : at + self.state.out_len]

    def commit(self) -> None:
        """Put `state` in use."""
        one = self.state
        slot = 1 - self._words[_SLOT_WORD]
        _SLOT.pack_into(
            self._map,
            _SLOTS_AT[slot],
            one.generation,
            one.in_base,
            one.out_base,
            one.out_half,
            one.out_len,
            one.cursor,
            one.writes,
            one.flags,
            one.half,
            one.checkpoint,
            one.received,
        )
        self._words[_SLOT_WORD] = slot

    # ------------------------------------------------------------------------------------------------------- received
    def buffer(self) -> memoryview:
        """Return where the next received bytes belong. Raises BadMemory if it is full.

        What was read is known by the kernel's count, so it needs no commit.
        """
        if self.in_len >= _IN_SIZE:
            raise BadMemory(f"{_IN_SIZE} bytes of one request")
        begin = _IN_AT[self.state.half]
        at = begin + self.in_len
        return self._view[at : min(at + READ, begin + _IN_SIZE)]

    def took(self, size: int) -> bytes:
        """Return the next `size` bytes, which were received into `buffer`."""
        at = _IN_AT[self.state.half] + self.in_len
        self.in_len += size
        return self._map[at : at + size]

    def received(self) -> bytes:
        """Return all bytes of the requests that are not answered yet."""
        at = _IN_AT[self.state.half]
        return self._map[at : at + self.in_len]

    # ------------------------------------------------------------------------------------------------------- rendered
    def render(self, data: bytes, pending: int) -> None:
        """Put bytes behind those rendered before, and put the state in use.

        `pending` of those before are not given to the kernel yet. Raises BadMemory if it is full.
        """
        state, sent = self.state, 0
        if pending == 0:
            sent = state.out_len
            state.out_base += sent
            state.out_len = 0
        elif state.out_len > _COMPACT and 4 * pending < state.out_len:
            self._move(pending)
        if state.out_len + len(data) > _OUT_SIZE:
            raise BadMemory(f"{_OUT_SIZE} bytes are not sent yet")
        at = _OUT_AT[state.out_half] + state.out_len
        self._map[at : at + len(data)] = data
        state.out_len += len(data)
        self.commit()
        if len(data) <= _RETURNED:
            self._give_back(at, sent)

    def _move(self, pending: int) -> None:
        """Move the unsent bytes to the begin of the other half."""
        state = self.state
        end = _OUT_AT[state.out_half] + state.out_len
        state.out_half = 1 - state.out_half
        at = _OUT_AT[state.out_half]
        self._map[at : at + pending] = self._map[end - pending : end]
        state.out_base += state.out_len - pending
        state.out_len = pending

    def set_open(self, value: bool) -> None:
        """Note whether the response goes on behind the next write; `render` puts it in use."""
        flags = self.state.flags & ~(_OPEN | _ANSWERED)
        self.state.flags = flags | (_OPEN if value else _ANSWERED)

    def set_journaled(self) -> None:
        """Note that the response can go on in another process; `render` puts it in use."""
        self.state.flags |= _JOURNALED

    @property
    def is_open(self) -> bool:
        """Return True if a response was begun and not ended."""
        return bool(self.state.flags & _OPEN)

    @property
    def is_answered(self) -> bool:
        """Return True if a response was ended, and nothing has come since."""
        return bool(self.state.flags & _ANSWERED)

    @property
    def is_journaled(self) -> bool:
        return bool(self.state.flags & _JOURNALED)

    def set_socket(self) -> None:
        """Note that the connection is a WebSocket; `render` puts it in use."""
        self.state.flags |= _SOCKET

    @property
    def is_socket(self) -> bool:
        """Return True if the connection was upgraded to a WebSocket."""
        return bool(self.state.flags & _SOCKET)

    def set_lasting(self) -> None:
        """Note that the connection's session waits for a client that has left; `render` puts it in use."""
        self.state.flags |= _LASTING

    @property
    def is_lasting(self) -> bool:
        return bool(self.state.flags & _LASTING)

    def set_away(self) -> None:
        """Note that the client is away, and put the state in use: the kernel counts no more."""
        self.state.flags |= _AWAY
        self.state.received = self.in_len
        self.commit()

    @property
    def is_away(self) -> bool:
        return bool(self.state.flags & _AWAY)

    # -------------------------------------------------------------------------------------------------------- journal
    def append(self, kind: int, stream: int, data: bytes) -> None:
        """Add a record to the journal. Raises BadMemory if it is full."""
        length = self._write_record(self.state.half, self._journal_len, kind, stream, data)
        self._journal_len = length
        self._words[_JOURNAL_WORD] = self.state.generation << 32 | length

    def _write_record(self, half: int, at: int, kind: int, stream: int, data: bytes) -> int:
        """Write a record at `at` bytes of a half of the journal; returns where it ends there."""
        end = at + _RECORD.size + len(data)
        if end > _JOURNAL_SIZE:
            raise BadMemory(f"{_JOURNAL_SIZE} bytes of the journal of one request")
        begin = _JOURNAL_AT[half]
        _RECORD.pack_into(self._map, begin + at, len(data), kind, stream)
        self._map[begin + at + _RECORD.size : begin + end] = data
        return end

    @property
    def size(self) -> int:
        """Return the bytes of what another process would handle again: received ones and records."""
        return self.in_len + self._journal_len

    def records(self) -> list[tuple[int, int, bytes]]:
        """Return the kind, stream and data of each record. Raises BadMemory."""
        begin = _JOURNAL_AT[self.state.half]
        found, at, end = [], begin, begin + self._journal_len
        while at < end:
            if at + _RECORD.size > end:
                raise BadMemory("a record is cut off")
            size, kind, stream = _RECORD.unpack_from(self._map, at)
            at += _RECORD.size
            if at + size > end:
                raise BadMemory("a record is cut off")
            found.append((kind, stream, self._map[at : at + size]))
            at += size
        return found

    def replace(self, records: Iterable[tuple[int, int, bytes]], received: bytes) -> None:
        """Replace journal and received bytes, all of it or nothing, and put the state in use.

        received: ends with the bytes received last, and is no longer than what it replaces. Raises
        BadMemory, and changes nothing, if the records do not fit.
        """
        state, half, length = self.state, 1 - self.state.half, 0
        for kind, stream, data in records:
            length = self._write_record(half, length, kind, stream, data)
        self._map[_IN_AT[half] : _IN_AT[half] + len(received)] = received
        before = state.half, self.in_len, self._journal_len
        state.generation += 1
        state.in_base += self.in_len - len(received)
        state.half, state.checkpoint = half, length
        self.in_len, self._journal_len = len(received), length
        self.commit()
        self._give_back(_IN_AT[before[0]], before[1])
        self._give_back(_JOURNAL_AT[before[0]], before[2])

    # ---------------------------------------------------------------------------------------------------- its requests
    def next_request(self) -> None:
        """Forget the requests so far: all are answered."""
        state, received, journaled = self.state, self.in_len, self._journal_len
        state.generation += 1
        state.in_base += received
        state.cursor = state.writes = state.flags = state.checkpoint = 0
        self.in_len = self._journal_len = 0
        self.commit()
        self._give_back(_IN_AT[state.half], received)
        self._give_back(_JOURNAL_AT[state.half], journaled)

    def _give_back(self, at: int, size: int) -> None:
        """Give the pages of `size` bytes back that are used no more, behind those often used."""
        if size > _RETURNED:
            self._map.madvise(mmap.MADV_REMOVE, at + _RETURNED, size - _RETURNED)

    def release(self) -> None:
        """Unmap the memory; its descriptor remains open."""
        self._words.release()
        self._view.release()
        with contextlib.suppress(BufferError):  # a read is in progress: it is unmapped behind it
            self._map.close()

    def close(self) -> None:
        """Unmap the memory and close its descriptor."""
        self.release()
        os.close(self.fd)
