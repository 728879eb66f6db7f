"""What one process has put into the memory of a connection is what the next reads, wherever the first one died."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import itertools
import mmap
import os
import random
import socket
import struct
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet_gateway.kept import kernel_counts
from motet_gateway.kept import memory as layout
from motet_gateway.kept.memory import SIZE, BadMemory, ConnectionMemory


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A TCP connection: our end, which does not block, and the client's."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as client,
    ):
        ours, _ = listener.accept()
        with ours:
            ours.setblocking(False)
            client.settimeout(5)
            yield ours, client


# ------------------------------------------------------------------------------------------------------ kernel's counts
def test_the_kernel_knows_what_it_took_and_what_was_read(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, client = pair
    assert (kernel_counts.taken(ours), kernel_counts.consumed(ours)) == (0, 0)
    rnd = random.Random(27)
    sent = read = 0
    client.setblocking(False)
    for _ in range(2000):
        try:
            sent += ours.send(bytes(rnd.randrange(1, 60_000)))
        except BlockingIOError:
            assert sent > 1 << 20, "megabytes wait in the kernel"
        for end, size in ((client, rnd.randrange(1, 90_000)), (ours, rnd.randrange(1, 3000))):
            try:
                got = len(end.recv(size))
            except BlockingIOError:
                continue
            read += got if end is ours else 0
        with contextlib.suppress(BlockingIOError):
            client.send(bytes(rnd.randrange(1, 3000)))
        assert (kernel_counts.taken(ours), kernel_counts.consumed(ours)) == (sent, read)


def test_the_end_of_the_client_counts_as_no_byte(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, client = pair
    client.sendall(bytes(1000))
    client.shutdown(socket.SHUT_WR)
    give_up = time.monotonic() + 5
    while ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == 1:
        assert time.monotonic() < give_up
    assert kernel_counts.consumed(ours) == 0
    assert len(ours.recv(600)) == 600
    assert kernel_counts.consumed(ours) == 600
    assert len(ours.recv(600)) == 400
    assert ours.recv(600) == b""
    assert kernel_counts.consumed(ours) == 1000


# --------------------------------------------------------------------------------------------------------------- memory
def adopted(memory: ConnectionMemory, consumed: int, taken: int) -> ConnectionMemory:
    return ConnectionMemory.adopt(os.dup(memory.fd), consumed, taken)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_at_any_time_the_next_process_has_what_was_not_taken_and_not_answered(
    seed: int,
) -> None:
    rnd = random.Random(seed)
    consumed, taken = rnd.randrange(100), rnd.randrange(100)
    memory = ConnectionMemory.create(consumed, taken)
    base = taken
    rendered, received, records = b"", b"", list[tuple[int, int, bytes]]()
    for _ in range(40):
        action = rnd.randrange(5)
        if action == 0:
            data = rnd.randbytes(rnd.randrange(1, 3000))
            memory.buffer()[: len(data)] = data
            consumed += len(data)  # the kernel counts it, before anybody else does
            if rnd.random() < 0.8:
                assert memory.took(len(data)) == data
            else:
                memory.in_len += len(data)
            received += data
        elif action in (1, 2):
            data = rnd.randbytes(rnd.choice([0, 10, 1000, 150_000]))
            memory.state.writes += 1
            memory.render(data, len(rendered) - (taken - base))
            rendered += data
        elif action == 3:
            memory.append(1, rnd.randrange(3), data := rnd.randbytes(rnd.randrange(200)))
            records.append((1, memory.records()[-1][1], data))
        elif rnd.random() < 0.3:
            memory.next_request()
            received, records = b"", []
        elif rnd.random() < 0.3:
            received = received[rnd.randrange(len(received) + 1) :]
            records = [(2, 1, rnd.randbytes(rnd.randrange(900))) for _ in range(rnd.randrange(3))]
            memory.replace(records, received)
        taken += rnd.randrange(len(rendered) - (taken - base) + 1)
        if rnd.random() < 0.3:
            taken = base + len(rendered)
        after = adopted(memory, consumed, taken)
        assert after.unsent() == rendered[taken - base :]
        assert after.received() == received
        assert after.records() == records
        assert after.secret == memory.secret
        after.close()
    memory.close()


def test_a_change_that_is_not_put_in_use_is_not_seen() -> None:
    """A process that dies within `render` has written bytes and a slot, but not the word that switches to it."""
    memory = ConnectionMemory.create(0, 0)
    memory.render(b"first", 0)
    in_use = memory._words[layout._SLOT_WORD]
    memory.render(b"second", 0)
    memory._words[layout._SLOT_WORD] = in_use  # as it was before the last store
    after = adopted(memory, 0, 5)
    assert after.unsent() == b""
    after.close()
    memory.close()


class Dead(Exception):
    """The process dies: it writes no further byte."""


class Mortal:
    """The map of a memory, in which `bytes` more are written."""

    def __init__(self, map_: mmap.mmap, bytes_: int):
        self._map, self.bytes = map_, bytes_

    def __getitem__(self, place: slice) -> bytes:
        return self._map[place]

    def __setitem__(self, place: slice, data: bytes) -> None:
        written = min(self.bytes, len(data))
        self._map[place.start : place.start + written] = data[:written]
        self.bytes -= written
        if written < len(data):
            raise Dead

    def madvise(self, *place: int) -> None:
        self._map.madvise(*place)


class Packing:
    """A struct that packs into the map of a `Mortal`."""

    def __init__(self, struct_: struct.Struct):
        self._struct, self.size, self.unpack_from = struct_, struct_.size, struct_.unpack_from

    def pack_into(self, map_: Mortal, at: int, *values: int) -> None:
        map_[at : at + self.size] = self._struct.pack(*values)


def test_a_death_at_every_byte_leaves_the_old_or_the_new_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = ConnectionMemory.create(0, 0)
    memory.buffer()[:9] = b"upgradeab"
    memory.took(9)
    real = memory._map
    checkpoints = [([(1, 0, b"record one"), (2, 3, b"")], b"upgradeab")]
    for number in range(4):  # into each half twice
        records = [(12, 0, b"checkpoint %d" % number * 3), (11, 0, bytes(number))]
        checkpoints.append((records, b"upgrade" + b"b" * (number < 2)))
    for record in checkpoints[0][0]:
        memory.append(*record)

    def found() -> tuple[list[tuple[int, int, bytes]], bytes]:
        after = adopted(memory, 9, 0)
        try:
            return after.records(), after.received()
        finally:
            after.close()

    steps = 0
    for old, new in itertools.pairwise(checkpoints):
        for bytes_ in itertools.count():
            steps += 1
            kept = dataclasses.replace(memory.state)
            place = memory.in_len, memory._journal_len
            with monkeypatch.context() as mortal:
                mortal.setattr(layout, "_RECORD", Packing(layout._RECORD))
                mortal.setattr(layout, "_SLOT", Packing(layout._SLOT))
                mortal.setattr(memory, "_map", Mortal(real, bytes_))
                try:
                    memory.replace(*new)
                except Dead:
                    memory.state, (memory.in_len, memory._journal_len) = kept, place
                else:
                    break
            assert found() == old
        assert found() == new
        memory.append(1, 1, b"behind it")  # of the new generation
        assert found() == ([*new[0], (1, 1, b"behind it")], new[1])
        memory.replace(*new)
    assert steps > 400
    memory.close()


def test_a_checkpoint_that_does_not_fit_changes_nothing() -> None:
    memory = ConnectionMemory.create(0, 0)
    memory.append(1, 0, b"record")
    with pytest.raises(BadMemory):
        memory.replace([(1, 0, bytes(2**25)), (1, 0, bytes(2**25))], b"")
    assert memory.records() == [(1, 0, b"record")]
    after = adopted(memory, 0, 0)
    assert after.records() == memory.records()
    after.close()
    memory.close()


def test_pages_of_a_large_request_are_given_back() -> None:
    memory = ConnectionMemory.create(0, 0)
    before = os.fstat(memory.fd).st_blocks
    for _ in range(100):
        view = memory.buffer()
        view[:] = bytes(len(view))
        memory.took(len(view))
    memory.render(bytes(5_000_000), 0)
    memory.next_request()
    memory.render(b"x", 0)
    assert os.fstat(memory.fd).st_blocks - before < 2 * (600_000 // 512)
    memory.close()


def test_more_than_fits_is_refused() -> None:
    memory = ConnectionMemory.create(0, 0)
    memory.in_len = 64 * 2**20
    with pytest.raises(BadMemory):
        memory.buffer()
    with pytest.raises(BadMemory):
        memory.render(bytes(64 * 2**20 + 1), 0)
    with pytest.raises(BadMemory):
        memory.append(1, 0, bytes(64 * 2**20))
    memory.close()


@pytest.mark.parametrize("what", ["size", "seals", "version", "counts", "slot", "record"])
def test_memory_that_is_not_of_this_layout_is_refused(what: str) -> None:
    memory = ConnectionMemory.create(0, 0)
    memory.render(b"abc", 0)
    memory.append(1, 0, b"record")
    fd, taken = os.dup(memory.fd), 0
    if what in ("size", "seals"):
        os.close(fd)
        fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, SIZE if what == "seals" else 4096)
        if what == "size":
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    elif what == "version":
        memory._map[7] += 1
    elif what == "counts":
        taken = 4
    elif what == "slot":
        memory._words[layout._SLOT_WORD] = 2
    else:
        memory._map[layout._JOURNAL_AT[0]] = 200
    with pytest.raises(BadMemory):
        ConnectionMemory.adopt(fd, 0, taken)
    os.close(fd)
    memory.close()
