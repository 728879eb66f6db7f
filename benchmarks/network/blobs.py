"""Measure the throughput of blobs over shared memory and TCP beside a plain memory copy.

Owner and reader are two processes. All transports are timed in turn, round by round, so that load
of other processes affects all alike: compare the ratios. `put` is the owner's copy, `get` the
reader's copy (for TCP: the transfer), `both` one after the other.

python benchmarks/run.py blobs --megabytes 64 --rounds 7
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from statistics import median

import msgspec
import uvloop

from motet_shared.blobs.store import BlobStore
from motet_shared.messages import BlobRef

Way = tuple[float, float]  # seconds to put, seconds to get


async def serve(pipe: Connection, nbytes: int) -> None:
    """Run the owner: put the data on request; answer with the reference and the seconds needed."""
    data, loop = os.urandom(1 << 20) * -(-nbytes // (1 << 20)), asyncio.get_running_loop()
    source = memoryview(data)[:nbytes]
    async with BlobStore("bench-owner", nbytes + (1 << 20)) as store:
        while (digest := await loop.run_in_executor(None, pipe.recv)) is not None:
            began = time.perf_counter()
            ref = store.put(source, digest=digest)
            pipe.send((msgspec.msgpack.encode(ref), time.perf_counter() - began))
            while store.stats()["blobs"]:  # noqa: ASYNC110 - the reader, another process, releases the blob
                await asyncio.sleep(0.0005)


def owner(pipe: Connection, nbytes: int) -> None:
    uvloop.run(serve(pipe, nbytes))


async def fetch(
    store: BlobStore, pipe: Connection, into: bytearray | None, tcp: bool, digest: bool
) -> Way:
    pipe.send(digest)
    encoded, put = await asyncio.to_thread(pipe.recv)
    ref = msgspec.msgpack.decode(encoded, type=BlobRef)
    if tcp:
        ref = msgspec.structs.replace(ref, transport="tcp", address=ref.fallback)
    began = time.perf_counter()
    await store.get(ref, into)
    return put, time.perf_counter() - began


async def copy(source: bytearray, into: bytearray) -> Way:
    began = time.perf_counter()
    memoryview(into)[:] = source
    between = time.perf_counter()
    memoryview(source)[:] = into
    return between - began, time.perf_counter() - between


async def measure(pipe: Connection, nbytes: int, rounds: int) -> dict[str, list[Way]]:
    into, source = bytearray(nbytes), bytearray(nbytes)
    async with BlobStore("bench-reader") as store:
        ways: dict[str, Callable[[], Awaitable[Way]]] = {
            "memory copy": lambda: copy(source, into),
            "shm, buffer reused": lambda: fetch(store, pipe, into, tcp=False, digest=False),
            "shm, fresh memory": lambda: fetch(store, pipe, None, tcp=False, digest=False),
            "shm, with digest": lambda: fetch(store, pipe, into, tcp=False, digest=True),
            "tcp, buffer reused": lambda: fetch(store, pipe, into, tcp=True, digest=False),
            "tcp, with digest": lambda: fetch(store, pipe, into, tcp=True, digest=True),
        }
        results: dict[str, list[Way]] = {name: [] for name in ways}
        for turn in range(rounds + 1):
            for name, way in ways.items():
                times = await way()
                if turn:  # the first round maps pages and opens connections
                    results[name].append(times)
    pipe.send(None)
    return results


def report(results: dict[str, list[Way]], nbytes: int) -> None:
    print(
        f"{nbytes / 1e6:.0f} MB, median of {len(results['memory copy'])} interleaved rounds, GB/s"
    )
    print(f"{'':22}{'put':>8}{'get':>8}{'both':>8}{'get / copy':>13}{'get / tcp':>12}")
    rates = {
        name: [
            nbytes / median(part) / 1e9
            for part in (*zip(*times, strict=True), [put + get for put, get in times])
        ]
        for name, times in results.items()
    }
    for name, (put, get, both) in rates.items():
        ratios = (
            f"{get / rates['memory copy'][1]:>13.2f}{get / rates['tcp, buffer reused'][1]:>12.2f}"
        )
        print(f"{name:22}{put:>8.2f}{get:>8.2f}{both:>8.2f}{ratios}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="GB/s of blobs over shared memory and TCP beside a memory copy."
    )
    parser.add_argument(
        "--megabytes", type=int, default=64, help="size of a blob, in 10^6 bytes (default: 64)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds (default: 7)")
    options = parser.parse_args()
    nbytes = options.megabytes * 1_000_000
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=owner, args=(theirs, nbytes))
    process.start()
    results = uvloop.run(measure(ours, nbytes, options.rounds))
    process.join(10)
    report(results, nbytes)


if __name__ == "__main__":
    main()
