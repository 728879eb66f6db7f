"""Blobs: leases against a model, real processes that share and die, and a server that is sent garbage."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from motet_shared.blobs import buffer as blobs_buffer
from motet_shared.blobs import published as blobs_shelf
from motet_shared.blobs import shm as blobs_shm
from motet_shared.blobs.lease import ALIGNMENT, Lease, Leases
from motet_shared.blobs.server import BlobServer
from motet_shared.blobs.store import BlobStore, sweep
from motet_shared.blobs.tcp import BlobClient, Get
from motet_shared.errors import BlobError, Overloaded
from motet_shared.messages import BlobRef
from support.peers.stream_server import listening
from support.running.until import until

MB = 1 << 20
ROOT = Path(__file__).parents[4]


# --------------------------------------------------------------------------------------------------- leases by model
READERS = st.sampled_from(["a", "b", "c"])


class LeaseMachine(RuleBasedStateMachine):
    """A lease lives until its last reader has released it or its time is up; its bytes until the last pin is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.erased: list[int] = []
        self.leases = Leases(20 * ALIGNMENT, 6, self.erased.append)
        self.live: dict[
            str, tuple[set[str], int, set[str]]
        ] = {}  # key → named readers, unnamed, done
        self.all: dict[str, Lease] = {}
        self.pinned: list[Lease] = []

    @rule(
        nbytes=st.integers(0, 8 * ALIGNMENT),
        readers=st.integers(1, 3) | st.sets(READERS, min_size=1),
    )
    def reserve(self, nbytes: int, readers: Any) -> None:
        lease = self.leases.reserve(nbytes, readers, 10.0, self.now)
        size = max(nbytes + -nbytes % ALIGNMENT, ALIGNMENT)
        if lease is None:
            gap, held = (
                self.leases.arena.largest_gap,
                len({*self.live, *(p.key for p in self.pinned)}),
            )
            assert gap < size or held == 6
            return
        assert lease.key not in self.all
        named = set() if isinstance(readers, int) else set(readers)
        self.live[lease.key] = (named, readers if isinstance(readers, int) else 0, set())
        self.all[lease.key] = lease

    @precondition(lambda self: self.all)
    @rule(data=st.data(), reader=READERS)
    def release(self, data: st.DataObject, reader: str) -> None:
        key = data.draw(st.sampled_from(list(self.all)))
        self.leases.release(key, reader)
        self._release(key, reader)

    @precondition(lambda self: self.all)
    @rule(data=st.data(), reader=READERS)
    def claim(self, data: st.DataObject, reader: str) -> None:
        key = data.draw(st.sampled_from(list(self.all)))
        claimed = self.leases.claim(key, reader, self.now)
        named, unnamed, done = self.live.get(key, (set(), 0, set()))
        if reader in named:
            assert claimed is self.all[key]
        elif unnamed and reader not in done:
            assert claimed is self.all[key]
            self.live[key] = (named | {reader}, unnamed - 1, done)
        else:
            assert claimed is None

    @rule(reader=READERS)
    def forget(self, reader: str) -> None:
        self.leases.forget(reader)
        for key in [key for key, (named, _, _) in self.live.items() if reader in named]:
            self._release(key, reader)

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        late = [key for key in self.live if self.all[key].expires <= self.now]
        self.leases.expire(self.now)
        for key in late:
            del self.live[key]

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        lease = self.all[data.draw(st.sampled_from(list(self.live)))]
        self.leases.pin(lease)
        self.pinned.append(lease)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        self.leases.unpin(self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1))))

    def _release(self, key: str, reader: str) -> None:
        named, unnamed, done = self.live.get(key, (set(), 0, set()))
        if reader in done:
            return
        if reader in named:
            named = named - {reader}
        elif unnamed:
            unnamed -= 1
        else:
            return
        self.live[key] = (named, unnamed, done | {reader})
        if not named and not unnamed:
            del self.live[key]

    @invariant()
    def exactly_the_live_leases_are_held(self) -> None:
        self.leases.check_integrity()
        assert {key for key in self.all if self.leases.get(key)} == set(self.live)
        assert len(self.erased) == len(self.all) - len(self.live)
        held = {
            id(lease): lease.size for lease in [*(self.all[key] for key in self.live), *self.pinned]
        }
        assert self.leases.arena.free_bytes == self.leases.arena.capacity - sum(held.values())


LeaseMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestLeases = LeaseMachine.TestCase


# ------------------------------------------------------------------------------------------------------ one process
@pytest.fixture
async def owner() -> AsyncIterator[BlobStore]:
    async with BlobStore(f"owner-{os.getpid()}", 4 * MB, patience=2.0) as store:
        yield store
        store.check_integrity()
    assert not list(blobs_shm.SHM.glob(f"motet-{store.instance}-*"))


@pytest.fixture
async def reader() -> AsyncIterator[BlobStore]:
    async with BlobStore("reader-1", patience=2.0) as store:
        yield store


def over_tcp(ref: BlobRef) -> BlobRef:
    return msgspec.structs.replace(ref, transport="tcp", address=ref.fallback)


def changed(ref: BlobRef, **fields: Any) -> BlobRef:
    return msgspec.structs.replace(ref, **fields)


@pytest.mark.parametrize("nbytes", [0, 1, 65, 300_000, 3 * MB])
async def test_bytes_come_back_over_both_transports_and_are_freed(
    owner: BlobStore, reader: BlobStore, nbytes: int
) -> None:
    data = os.urandom(nbytes)
    for way in (lambda ref: ref, over_tcp):
        ref = owner.put(data, "uint8", (nbytes,))
        assert ref.owner == owner.instance
        assert bytes(await reader.get(way(ref))) == data
        await until(lambda: owner.stats()["blobs"] == 0)


async def test_a_reference_survives_the_wire(owner: BlobStore, reader: BlobStore) -> None:
    ref = owner.put(b"0123456789ab", "float32", [3])
    ref = msgspec.msgpack.decode(msgspec.msgpack.encode(ref), type=BlobRef)
    assert (ref.dtype, ref.shape) == ("float32", (3,))
    assert bytes(await reader.get(ref)) == b"0123456789ab"


async def test_a_buffer_is_filled_in_place(owner: BlobStore, reader: BlobStore) -> None:
    ref, into = owner.put(b"abc", readers=2), bytearray(b"------")
    view = await reader.get(ref, into, release=False)
    assert (bytes(view), bytes(into)) == (b"abc", b"abc---")
    for wrong in (bytearray(2), b"too"):
        with pytest.raises(BlobError, match=r"into: .* 3"):
            await reader.get(ref, wrong)


async def test_arrays_go_in_as_they_are(owner: BlobStore, reader: BlobStore) -> None:
    array = memoryview(struct.pack("4f", 1, 2, 3, 4)).cast("f", (2, 2))
    assert bytes(await reader.get(owner.put(array, "float32", (2, 2)))) == bytes(array)
    with pytest.raises(BlobError):
        owner.put(memoryview(b"abcdef")[::2])
    with pytest.raises(BlobError, match=r"\(3,\) .*12 .*16"):
        owner.put(array, "float32", (3,))


async def test_all_readers_must_release(owner: BlobStore, reader: BlobStore) -> None:
    async with BlobStore("reader-2") as second:
        for readers in (2, ["reader-1", "reader-2"]):
            ref = owner.put(b"x", readers=readers)
            reader.release(ref)
            reader.release(ref)  # said twice, counts once
            await asyncio.sleep(0.03)
            assert owner.stats()["blobs"] == 1
            await second.get(ref)
            await until(lambda: owner.stats()["blobs"] == 0)


async def test_a_lease_runs_out_unless_it_is_renewed(owner: BlobStore, reader: BlobStore) -> None:
    kept, left = owner.put(b"kept", ttl=1.0), owner.put(b"left", ttl=1.0)
    async with asyncio.timeout(20):
        while not owner.stats()["expired"]:
            await asyncio.sleep(0.02)
            await reader.renew(kept)
    assert owner.stats()["expired"] == 1
    for ref in (left, over_tcp(left)):
        with pytest.raises(BlobError):
            await reader.get(ref)
    with pytest.raises(BlobError):
        await reader.renew(left)
    assert bytes(await reader.get(kept)) == b"kept"


async def test_an_owner_reads_renews_and_drops_its_own(owner: BlobStore) -> None:
    ref = owner.put(b"mine")
    await owner.renew(ref)
    assert bytes(await owner.get(ref)) == b"mine"
    assert owner.stats()["blobs"] == 0
    ref = owner.put(b"mine")
    owner.drop(ref)
    owner.drop(ref)
    assert owner.stats()["blobs"] == 0


async def test_a_full_store_says_so_with_sizes_and_waits_within_bounds(
    owner: BlobStore, reader: BlobStore
) -> None:
    with pytest.raises(BlobError, match=f"{5 * MB} .*{4 * MB}"):
        owner.put(bytes(5 * MB))
    ref = owner.put(bytes(3 * MB))
    with pytest.raises(Overloaded, match=f"{2 * MB} .*{MB} .*{4 * MB}"):
        owner.put(bytes(2 * MB))
    with pytest.raises(Overloaded):
        await owner.put_async(bytes(2 * MB), wait=0.05)
    waiting = asyncio.create_task(owner.put_async(bytes(2 * MB), wait=5.0))
    await asyncio.sleep(0.02)
    reader.release(ref)
    assert (await waiting).nbytes == 2 * MB


async def test_expired_blobs_make_room_at_once(owner: BlobStore) -> None:
    owner.put(bytes(4 * MB), ttl=0.05)
    assert (await owner.put_async(bytes(4 * MB), wait=1.0)).nbytes == 4 * MB


@pytest.mark.parametrize("is_early", [True, False])
async def test_a_read_that_fails_around_its_cancel_is_not_logged(
    is_early: bool,
    owner: BlobStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`is_early`: it is cancelled before it fails, and once more."""
    ref = owner.put(bytes(MB))
    begun, goes_on = threading.Event(), threading.Event()

    def read(segment: blobs_shm.Segment, key: str, into: Any) -> None:
        begun.set()
        goes_on.wait(10)
        raise BlobError("it is gone")

    monkeypatch.setattr(blobs_shm.Segment, "read", read)
    task = asyncio.create_task(owner.get(ref))
    await asyncio.to_thread(begun.wait, 10)
    if is_early:
        task.cancel()
        await asyncio.sleep(0)
    goes_on.set()
    time.sleep(0.05)  # noqa: ASYNC251 -- the thread has ended, and the loop does not know
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    del task
    await asyncio.sleep(0.01)  # the thread forgets its work
    gc.collect()
    assert [one.getMessage() for one in caplog.records if one.name == "asyncio"] == []


async def test_a_put_that_is_cancelled_keeps_nothing(owner: BlobStore) -> None:
    task = asyncio.create_task(owner.put_async(bytes(3 * MB)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert owner.stats()["blobs"] == 0


async def test_many_threads_put_at_once(owner: BlobStore, reader: BlobStore) -> None:
    refs: list[tuple[bytes, BlobRef]] = []

    def put(letter: int) -> None:
        for i in range(20):
            data = bytes([letter, i]) * (100 + 50 * i)
            refs.append((data, owner.put(data)))

    threads = [threading.Thread(target=put, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    for data, ref in refs:
        assert bytes(await reader.get(ref)) == data
    await until(lambda: owner.stats()["blobs"] == 0)


async def test_a_recycled_place_is_never_served_as_somebody_elses(
    owner: BlobStore, reader: BlobStore
) -> None:
    first = owner.put(b"first")
    owner.drop(first)
    second = owner.put(b"other")
    assert (
        first.key.split("-")[0] == second.key.split("-")[0]
    )  # the same slot, and the same bytes of the segment
    for ref in (first, over_tcp(first)):
        with pytest.raises(BlobError):
            await reader.get(ref)
    assert bytes(await reader.get(second)) == b"other"


async def test_a_blob_freed_while_it_is_copied_is_an_error(
    owner: BlobStore, reader: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = owner.put(b"first", digest=False)
    real = blobs_buffer.copy

    def slow_copy(target: memoryview, source: memoryview) -> None:
        monkeypatch.setattr(blobs_shm, "copy", real)
        owner.drop(ref)
        owner.put(b"other", digest=False)
        real(target, source)

    monkeypatch.setattr(blobs_shm, "copy", slow_copy)
    with pytest.raises(BlobError):
        await reader.get(ref)


async def test_a_reader_that_dies_while_its_blob_is_written_leaves_nothing(
    owner: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow_copy(target: memoryview, source: memoryview) -> None:
        owner.forget("decode-1")
        blobs_buffer.copy(target, source)

    monkeypatch.setattr(blobs_shelf, "copy", slow_copy)
    with pytest.raises(BlobError):
        owner.put(b"late", readers=["decode-1"])
    assert owner.stats()["bytes_used"] == 0


async def test_reading_while_places_are_recycled_gives_whole_blobs_or_errors(
    owner: BlobStore,
) -> None:
    """A storm: one thread puts and drops, readers may find a blob gone but never mixed."""
    latest: list[BlobRef] = []
    stop = threading.Event()

    def churn() -> None:
        n = 0
        while not stop.is_set():
            n += 1
            ref = owner.put(bytes([n % 256]) * 50_000, digest=False)
            latest[:] = [ref]
            owner.drop(ref)

    async with BlobStore("reader-9") as reader:
        thread = threading.Thread(target=churn)
        thread.start()
        outcomes = {"whole": 0, "gone": 0}
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)  # so that the threads change places in the middle of a read
        try:
            await until(lambda: latest)
            for _ in range(400):
                await asyncio.sleep(0)
                try:
                    data = bytes(await reader.get(latest[0], release=False))
                except BlobError:
                    outcomes["gone"] += 1
                else:
                    outcomes["whole"] += 1
                    assert len(set(data)) == 1
        finally:
            sys.setswitchinterval(interval)
            stop.set()
            await asyncio.to_thread(thread.join)
    assert sum(outcomes.values()) == 400


async def test_a_digest_mismatch_is_an_error_and_keeps_the_lease(
    owner: BlobStore, reader: BlobStore
) -> None:
    ref = owner.put(b"payload")
    for bad in (changed(ref, digest="00" * 16), over_tcp(changed(ref, digest="00" * 16))):
        with pytest.raises(BlobError):
            await reader.get(bad)
    assert bytes(await reader.get(ref)) == b"payload"
    assert owner.put(b"x", digest=False).digest == ""


@pytest.mark.parametrize("way", [lambda ref: ref, over_tcp])
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"key": "0-" + "0" * 32}, "0" * 32),
        ({"key": "4095-" + "a" * 32}, "4095"),
        ({"key": "99999-" + "a" * 32}, "99999"),
        ({"key": "no key"}, None),
        ({"key": ""}, None),
        ({"nbytes": 3}, "7 .* 3"),
        ({"nbytes": -1}, "-1"),
        ({"nbytes": 1 << 60}, str(1 << 60)),
        ({"dtype": "float32", "shape": (2,)}, "8 .* 7"),
    ],
)
async def test_wrong_references_are_typed_errors(
    owner: BlobStore, reader: BlobStore, way: Any, fields: dict[str, Any], named: str | None
) -> None:
    ref = way(owner.put(b"payload"))
    with pytest.raises(BlobError, match=named):
        await reader.get(changed(ref, **fields))
    assert bytes(await reader.get(ref)) == b"payload"


async def test_an_unknown_transport_or_address_is_a_typed_error(
    owner: BlobStore, reader: BlobStore
) -> None:
    ref = owner.put(b"payload")
    for fields, named in [
        ({"transport": "rdma"}, "'rdma'"),
        ({"address": "../etc/passwd", "fallback": ""}, "passwd"),
        ({"address": "motet-owner-00000000", "fallback": ""}, "motet-owner-00000000"),
        ({"transport": "tcp", "address": "nowhere"}, "nowhere"),
        ({"transport": "tcp", "address": "127.0.0.1:1"}, r"127\.0\.0\.1:1"),
        ({"transport": "tcp", "address": "127.0.0.1:99999"}, "99999"),
        ({"transport": "tcp", "address": "a..b:80"}, r"a\.\.b"),
        ({"transport": "tcp", "address": "é" * 100 + ":80"}, None),
        ({"transport": "tcp", "address": "a\0b:80"}, None),
    ]:
        with pytest.raises(BlobError, match=named):
            await reader.get(changed(ref, **fields))


async def test_named_readers_only(owner: BlobStore, reader: BlobStore) -> None:
    ref = over_tcp(owner.put(b"secret", readers=["decode-1"]))
    with pytest.raises(BlobError, match="reader-1"):
        await reader.get(ref)
    nobody: list[Any] = [0, -1, []]
    for readers in nobody:
        with pytest.raises(BlobError, match="readers: "):
            owner.put(b"x", readers=readers)


# -------------------------------------------------------------------------------------------------- shared memory
async def test_an_unreachable_segment_falls_back_to_tcp(owner: BlobStore, tmp_path: Path) -> None:
    async with BlobStore(
        "reader-2", folder=tmp_path
    ) as elsewhere:  # as in a container with its own /dev/shm
        data = os.urandom(2 * MB)
        assert bytes(await elsewhere.get(owner.put(data))) == data
        assert elsewhere.stats()["mapped"] == 0
        await until(lambda: owner.stats()["blobs"] == 0)


async def test_a_file_that_is_no_segment_falls_back_to_tcp(
    owner: BlobStore, tmp_path: Path
) -> None:
    for n, content in enumerate([b"", b"x" * 10, b"x" * 9999, b"MotetB01" + b"\xff" * 100]):
        (tmp_path / f"motet-fake-{n:08x}").write_bytes(content)
        async with BlobStore("reader-2", folder=tmp_path) as elsewhere:
            ref = changed(owner.put(b"data"), address=f"motet-fake-{n:08x}")
            assert bytes(await elsewhere.get(ref)) == b"data"


async def test_without_shared_memory_blobs_travel_by_tcp(reader: BlobStore, tmp_path: Path) -> None:
    async with BlobStore("owner-x", MB, shared=False) as store:
        ref = store.put(b"plain")
        assert (ref.transport, ref.address) == ("tcp", store.address)
        assert bytes(await reader.get(ref)) == b"plain"
        assert not list(blobs_shm.SHM.glob("motet-owner-x-*"))


async def test_too_little_memory_is_said_at_the_start() -> None:
    with pytest.raises(BlobError, match=r"/dev/shm .*\d+ .*shm_size"):
        await BlobStore("owner-y", 1 << 50).start()
    assert not list(blobs_shm.SHM.glob("motet-owner-y-*"))


def held(file: Path) -> tuple[int, int]:
    """Return the bytes that a file takes, and its size."""
    found = file.stat()
    return found.st_blocks * 512, found.st_size


async def test_a_segment_takes_memory_as_it_is_needed(reader: BlobStore, tmp_path: Path) -> None:
    async with BlobStore("owner-z", 64 * MB, folder=tmp_path) as store:
        (name,) = os.listdir(tmp_path)
        assert held(tmp_path / name)[0] < MB < 64 * MB < held(tmp_path / name)[1]
        ref = store.put(bytes(range(256)) * (9 << 12))
        assert bytes(await reader.get(ref)) == bytes(range(256)) * (9 << 12)
        assert 9 * MB < held(tmp_path / name)[0] < 16 * MB
        whole = await store.put_async(bytes(64 * MB), wait=5.0)
        assert await reader.get(whole) == bytes(64 * MB)
        assert len(set(held(tmp_path / name))) == 1


async def test_a_put_for_which_there_is_no_memory_is_refused_and_keeps_nothing(
    owner: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    before = owner.stats()
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full)
        with pytest.raises(Overloaded, match=r"\d+ free; .*shm_size"):
            owner.put(b"data")
    assert owner.stats() == before
    assert owner.put(b"data").nbytes == 4


async def test_a_store_without_capacity_only_reads(reader: BlobStore) -> None:
    with pytest.raises(BlobError):
        reader.put(b"x")


async def test_only_abandoned_segments_are_swept(tmp_path: Path) -> None:
    held = blobs_shm.Segment.create("held-1", MB, 8, tmp_path)
    for name in ("motet-dead-1-00000001", "motet-known-1-00000002", "motet-x", "other"):
        (tmp_path / name).write_bytes(b"")
    assert sweep({"known-1"}, tmp_path) == ["motet-dead-1-00000001"]
    assert held.name in os.listdir(tmp_path)
    held.close()
    assert sorted(os.listdir(tmp_path)) == ["motet-known-1-00000002", "motet-x", "other"]


# --------------------------------------------------------------------------------------------------- real processes
CHILD = """
import asyncio, sys, msgspec
from motet_shared.blobs.store import BlobStore
from motet_shared.messages import BlobRef

async def main(instance, capacity):
    async with BlobStore(instance, int(capacity), patience=2.0) as store:
        loop = asyncio.get_running_loop()
        print("ready", flush=True)
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            verb, _, rest = line.partition(" ")
            if verb == "put":
                print(msgspec.json.encode(store.put(bytes.fromhex(rest))).decode(), flush=True)
            else:
                ref = msgspec.json.decode(rest, type=BlobRef)
                if verb == "renew":
                    await store.renew(ref)
                data = await store.get(ref, release=verb == "get")
                print(bytes(data).hex(), flush=True)

asyncio.run(main(*sys.argv[1:]))
"""


class Process:
    """A store in a process of its own, told what to do line by line."""

    def __init__(self, process: asyncio.subprocess.Process):
        self.process = process

    @classmethod
    async def start(cls, instance: str, capacity: int = 0) -> Process:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "shared"), "PYTHONWARNINGS": "error"}
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", CHILD, instance, str(capacity)),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=environment,
        )
        self = cls(process)
        assert await self._line() == "ready"
        return self

    async def _line(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.wait_for(self.process.stdout.readline(), 20)).decode().strip()

    async def ask(self, verb: str, what: str | BlobRef) -> str:
        assert self.process.stdin is not None
        text = what if isinstance(what, str) else msgspec.json.encode(what).decode()
        self.process.stdin.write(f"{verb} {text}\n".encode())
        return await self._line()

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.communicate()

    async def end(self) -> str:
        """Close its input; returns what it said on stderr."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        _, errors = await asyncio.wait_for(self.process.communicate(), 20)
        return errors.decode()


async def test_two_processes_share_without_warnings_or_leaks(owner: BlobStore) -> None:
    child = await Process.start("child-1", 2 * MB)
    data = os.urandom(5000)
    assert await child.ask("get", owner.put(data)) == data.hex()
    await until(lambda: owner.stats()["blobs"] == 0)
    ref = msgspec.json.decode(await child.ask("put", data.hex()), type=BlobRef)
    assert bytes(await owner.get(ref)) == data
    assert owner.stats()["mapped"] == 1
    assert await child.end() == ""  # no complaint of a resource tracker
    assert not list(blobs_shm.SHM.glob("motet-child-1-*"))


async def test_a_killed_readers_leases_end_when_it_is_reported_dead(owner: BlobStore) -> None:
    child = await Process.start("child-2")
    named, claimed = owner.put(b"named", readers=["child-2"]), owner.put(b"claimed")
    assert await child.ask("look", named) == b"named".hex()
    assert await child.ask("renew", claimed) == b"claimed".hex()
    await child.kill()
    assert owner.stats()["blobs"] == 2
    owner.forget("child-2")
    assert owner.stats()["blobs"] == 0


async def test_a_killed_owner_leaves_an_error_and_sweep_cleans_up(reader: BlobStore) -> None:
    child = await Process.start("child-3", 2 * MB)
    seen, unseen = [
        msgspec.json.decode(await child.ask("put", "abcd"), type=BlobRef) for _ in range(2)
    ]
    await reader.get(seen, release=False)
    assert sweep(()) == []  # its process lives
    await child.kill()
    assert sweep({"child-3"}) == []
    assert sweep({"child-4"}) == [seen.address]
    reader.forget("child-3")
    for ref in (seen, unseen, over_tcp(seen)):
        with pytest.raises(BlobError):
            await reader.get(ref)
    reader.release(seen)
    await until(lambda: reader.stats()["lost_releases"] == 1)


async def test_a_store_sweeps_what_the_dead_left_when_it_starts(tmp_path: Path) -> None:
    (tmp_path / "motet-dead-1-00000001").write_bytes(b"")
    async with BlobStore("owner-2", MB, folder=tmp_path):
        assert len(os.listdir(tmp_path)) == 1
    assert os.listdir(tmp_path) == []


# --------------------------------------------------------------------------------------------------------------- tcp
def head(length: int, magic: bytes = b"MBL1") -> bytes:
    return struct.pack("!4sI", magic, length)


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        head(1 << 31),
        head(5) + b"\xc1\xff\x00ab",
        head(8) + msgspec.msgpack.encode(["z", 1])[:8].ljust(8, b"\0"),
        head(3) + msgspec.msgpack.encode(["g"]) + b"\0",
        head(2) + msgspec.msgpack.encode({})[:1] + b"\0",
        head(100) + b"short",
        os.urandom(4000),
    ],
)
async def test_the_server_survives_garbage(
    owner: BlobStore, reader: BlobStore, garbage: bytes
) -> None:
    host, port = owner.address.split(":")
    stream, writer = await asyncio.open_connection(host, int(port))
    writer.write(garbage)
    writer.write_eof()
    answer = await asyncio.wait_for(stream.read(), 20)
    writer.close()
    await writer.wait_closed()
    assert answer.startswith(b"MBL1")
    assert b"malformed blob request" in answer
    assert bytes(await reader.get(over_tcp(owner.put(b"fine")))) == b"fine"


async def test_connections_are_bounded_and_the_rest_told_to_come_back(owner: BlobStore) -> None:
    published = owner._own_blobs()
    server = BlobServer(published, connections=2, patience=1.0)
    port = await server.start("127.0.0.1", 0)
    held = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
    for sock in held:
        sock.sendall(head(100))  # a request that does not end
    await until(lambda: server.open_connections == 2 and not server._resting)
    ref, client = owner.put(b"data", readers=2), BlobClient(patience=1.0)
    request = Get(ref.key, 4, "reader-1")
    with pytest.raises(Overloaded, match="2"):
        await client.fetch(f"127.0.0.1:{port}", request, memoryview(bytearray(4)))
    for sock in held:
        sock.close()
    await until(lambda: server.open_connections == 0)
    await client.fetch(f"127.0.0.1:{port}", request, memoryview(bytearray(4)))
    client.close()
    await server.close()


async def test_a_connection_without_a_request_gives_way(owner: BlobStore) -> None:
    server = BlobServer(owner._own_blobs(), connections=2, patience=1.0)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    clients = [BlobClient(patience=1.0) for _ in range(3)]  # each keeps its connection
    ref = owner.put(b"data", readers=6)
    for number in (0, 1, 2, 0, 1, 2):
        into = bytearray(4)
        await clients[number].fetch(address, Get(ref.key, 4, f"reader-{number}"), memoryview(into))
        assert into == b"data"
    assert server.refused == 0
    await until(lambda: server.open_connections == 2)
    for client in clients:
        client.close()
    await server.close()


async def test_a_reader_that_stops_reading_loses_its_transfer_only(reader: BlobStore) -> None:
    async with BlobStore("owner-4", 32 * MB) as store:
        big = store.put(
            bytes(30 * MB), readers=2, digest=False
        )  # more than the socket buffers hold
        server = BlobServer(store._own_blobs(), transfers=1, patience=0.4)
        port = await server.start("127.0.0.1", 0)
        body = msgspec.msgpack.encode(Get(big.key, big.nbytes, "stuck-1"))
        with socket.create_connection(("127.0.0.1", port)) as stuck:
            stuck.sendall(head(len(body)) + body)
            await until(lambda: server.open_connections == 1)
            await until(lambda: server.open_connections == 0)
        there = changed(over_tcp(big), address=f"127.0.0.1:{port}")
        assert len(await reader.get(there)) == 30 * MB
        await server.close()


async def test_a_lease_that_ends_during_a_transfer_frees_its_bytes_afterwards(
    owner: BlobStore,
) -> None:
    ref = owner.put(b"first", digest=False)
    with owner._own_blobs().lend(Get(ref.key, 5, "reader-1")) as data:
        owner.drop(ref)
        other = owner.put(b"other", digest=False)
        assert bytes(data) == b"first"
        owner.check_integrity()
    owner.drop(other)
    assert owner.stats()["bytes_used"] == 0


OK_8 = msgspec.msgpack.encode(["k", 8])


@pytest.mark.parametrize(
    ("reply", "named"),
    [
        (head(len(OK_8)) + OK_8 + b"1234", "4 of 8"),
        (head(len(OK_8)) + OK_8, "8"),
        (
            head(len(OK_8)) + msgspec.msgpack.encode(["k", 9]),
            "9 .*8",
        ),
        (head(100) + b"\x92", "1 of 100"),
        (head(2) + b"\x91\xc1", None),
        (b"HTTP/1.1 400 Bad Request\r\n", "HTTP"),
        (b"", None),
    ],
)
async def test_a_truncated_or_malformed_transfer_is_a_typed_error(
    reader: BlobStore, reply: bytes, named: str | None
) -> None:
    async def answer(stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await stream.read(100)
        writer.write(reply)
        await writer.drain()

    async with listening(answer) as port:
        ref = BlobRef("tcp", f"127.0.0.1:{port}", "0-" + "a" * 32, 8)
        with pytest.raises(BlobError, match=named):
            await reader.get(ref)


async def test_a_silent_owner_is_given_up() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    async with BlobStore("reader-3", patience=0.2) as reader:
        ref = BlobRef("tcp", f"127.0.0.1:{listener.getsockname()[1]}", "0-" + "a" * 32, 8)
        with pytest.raises(BlobError, match=r"0\.2 s"):
            await reader.get(ref)
    listener.close()


async def test_a_connection_that_the_owner_closed_is_made_anew(reader: BlobStore) -> None:
    async with BlobStore("owner-3", MB) as store:
        port = int(store.address.split(":")[1])
        await reader.get(over_tcp(store.put(b"one")))
        await until(lambda: store.stats()["blobs"] == 0)
    async with BlobStore("owner-3", MB, port=port) as store:
        assert bytes(await reader.get(over_tcp(store.put(b"two")))) == b"two"
