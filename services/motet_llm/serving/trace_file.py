"""Join the Chrome traces of many recordings: torch's profiler writes one file for each."""

from __future__ import annotations

import contextlib
import gzip
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Raw, Struct
from torch.profiler import profile

_READ = 128 << 10  # bytes per piece


class _Recorded(Struct):
    """Decode what kineto writes.

    Times are microseconds since `baseTimeNanoseconds`, which is the same for all of a process.
    """

    traceEvents: list[Raw]
    baseTimeNanoseconds: int = 0
    schemaVersion: int = 1


class _Kind(Struct):
    ph: str
    cat: str = ""


class _Name(Struct, frozen=True):
    """Decode a metadata event without its time."""

    name: str
    pid: int | str
    tid: int | str
    args: Raw


_decode = msgspec.json.Decoder(_Recorded).decode
_kind = msgspec.json.Decoder(_Kind).decode
_name = msgspec.json.Decoder(_Name).decode


class TraceFile:
    """Write a gzipped trace that grows by one recording at a time, and is deleted when closed."""

    def __init__(self) -> None:
        self._raw = tempfile.TemporaryFile()  # noqa: SIM115 - `close` does
        self._file = gzip.GzipFile(fileobj=self._raw, mode="wb", compresslevel=1)
        self._names: set[tuple[object, ...]] = (
            set()
        )  # names of threads and processes: each recording repeats them
        self._events = 0

    def add(self, recording: profile) -> None:
        """Append the events of a recording that was stopped."""
        with tempfile.NamedTemporaryFile(suffix=".json") as part:
            recording.export_chrome_trace(part.name)
            found = _decode(Path(part.name).read_bytes())
        if not self._events:
            head = {
                "schemaVersion": found.schemaVersion,
                "baseTimeNanoseconds": found.baseTimeNanoseconds,
            }
            self._file.write(msgspec.json.encode(head)[:-1] + b',"traceEvents":[\n')
        kept = [bytes(event) for event in found.traceEvents if self._wanted(event)]
        self._file.write((b",\n" if self._events else b"") + b",\n".join(kept))
        self._events += len(kept)

    def _wanted(self, event: Raw) -> bool:
        """Return False for marks of a recording's bounds, and for names that are known already."""
        kind = _kind(event)
        if kind.ph == "M":
            name = _name(event)
            key = (name.name, name.pid, name.tid, bytes(name.args))
            known = key in self._names
            self._names.add(key)
            return not known
        return kind.ph != "i" and kind.cat != "Trace"

    def pieces(self) -> Iterator[bytes]:
        """Yield the whole file in pieces; nothing can be added afterwards."""
        self._file.write(b"\n]}\n")
        self._file.close()
        self._raw.seek(0)
        while piece := self._raw.read(_READ):
            yield piece

    def close(self) -> None:
        """Drop the file. What cannot be written any more, to a full disk, is not needed either."""
        for file in (self._file, self._raw):
            with contextlib.suppress(OSError):
                file.close()
