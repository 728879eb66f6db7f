"""Compile csrc/*.cpp into one shared library per instruction set, in a cache folder.

The libraries are plain C: they include no header of Python or torch, so one build takes seconds and
serves every version of both. OpenMP's symbols are left undefined and are resolved at load time by
the runtime that torch brought, so that kernels and torch share one thread pool and
`torch.set_num_threads` applies to both.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "csrc"
# Contraction off: a product and a sum round once or twice as the source says, in every inlined copy
# alike. Bit-identical results between tile shapes depend on it.
FLAGS = "-std=c++17 -O3 -fPIC -fopenmp -fvisibility=hidden -ffp-contract=off -fno-math-errno -fno-trapping-math -Wall"
TIMEOUT_S = 600

log = logging.getLogger(__name__)


class BuildError(Exception):
    """Report that no native library is available, and why."""


@dataclass(frozen=True, slots=True)
class Isa:
    """Describe a build target of the sources: what it needs of the CPU, and how to compile for it.

    `needs` are flags of /proc/cpuinfo.
    """

    name: str
    needs: frozenset[str]
    flags: str


_AVX2 = frozenset({"avx2", "fma", "f16c"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_AVX2_FLAGS = "-mavx2 -mfma -mf16c"
_AVX512_FLAGS = (
    f"{_AVX2_FLAGS} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512"
)
_AVX512_BF16 = _AVX512 | {"avx512_vnni", "avx512_bf16"}
_AVX512_BF16_FLAGS = f"{_AVX512_FLAGS} -mavx512vnni -mavx512bf16"

# Best first.
ISAS = {
    isa.name: isa
    for isa in (
        Isa(
            "amx",
            _AVX512_BF16 | {"amx_tile", "amx_bf16", "amx_int8"},
            f"{_AVX512_BF16_FLAGS} -mamx-tile -mamx-bf16 -mamx-int8",
        ),
        Isa("avx512bf16", _AVX512_BF16, _AVX512_BF16_FLAGS),
        Isa("avx512vnni", _AVX512 | {"avx512_vnni"}, f"{_AVX512_FLAGS} -mavx512vnni"),
        Isa("avx512", _AVX512, _AVX512_FLAGS),
        Isa("avx2", _AVX2, _AVX2_FLAGS),
        Isa("scalar", frozenset(), ""),
    )
}


def supported() -> list[Isa]:
    """Return the instruction sets that this process may use, best first; `scalar` always is.

    Asks Linux for the registers of AMX where the CPU has them: it grants them per process.
    """
    flags: set[str] = set()
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() == "x86_64" and cpuinfo.exists():
        line = next(
            (line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), ""
        )
        flags = set(line.partition(":")[2].split())
        if "amx_tile" in flags and not _request_tiles():
            flags.remove("amx_tile")
    return [isa for isa in ISAS.values() if isa.needs <= flags]


def multiplies_bfloat16(name: str) -> bool:
    """Return True if `name` is an instruction set with products of bfloat16, False also for none."""
    return name in ISAS and "avx512_bf16" in ISAS[name].needs


def multiplies_tiles(name: str) -> bool:
    """Return True if `name` is an instruction set with tile registers (AMX), False also for none."""
    return name in ISAS and "amx_tile" in ISAS[name].needs


def _request_tiles() -> bool:
    """Ask Linux for AMX's tile registers; return False where it refuses.

    See Documentation/arch/x86/xstate.rst of Linux.
    """
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    refusal: int = ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data)
    return refusal == 0


def cache_root() -> Path:
    """Return `$MOTET_CACHE`, by default ~/.cache/motet."""
    return Path(os.environ.get("MOTET_CACHE") or Path.home() / ".cache" / "motet")


def cache_folder() -> Path:
    """Return `kernels/<hash>` under the cache root.

    The hash covers the sources, the flags and the machine type, not the compiler, so that an image
    without a compiler finds what was built for it.
    """
    digest = hashlib.sha256(f"{platform.machine()} {FLAGS}".encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return cache_root() / "kernels" / digest.hexdigest()[:16]


def library(isa: Isa) -> Path:
    """Return the path of the library of an instruction set, whether it is built or not."""
    name = hashlib.sha256(isa.flags.encode()).hexdigest()[:8]
    return cache_folder() / f"motet_{isa.name}_{name}.so"


def build(isa: Isa) -> Path:
    """Return the library of an instruction set, built if it is not in the cache.

    Concurrent calls of several processes are safe. Raises `BuildError` where there is no compiler,
    the compiler fails or the cache cannot be written.
    """
    path = library(isa)
    if path.exists():
        return path
    compiler = find_compiler()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _lock(path.with_suffix(".lock")):
            if not path.exists():
                _compile(compiler, isa, path)
    except OSError as error:
        raise BuildError(
            f"cannot write to {path.parent}: {error.strerror}; set MOTET_CACHE to a folder"
        ) from error
    return path


def find_compiler() -> str:
    """Return the path of the C++ compiler; raise `BuildError` if there is none."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "c++")):
        if found := shutil.which(name):
            return found
    raise BuildError("no C++ compiler (install g++)")


def _compile(compiler: str, isa: Isa, path: Path) -> None:
    start = time.monotonic()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{isa.name}-") as folder:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        flags = [*FLAGS.split(), *isa.flags.split()]
        commands = [
            [compiler, *flags, "-c", str(s), "-o", str(o)]
            for s, o in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        linked = Path(folder) / path.name
        # Without -fopenmp: see the docstring of this module.
        _run([compiler, "-shared", *map(str, objects), "-o", str(linked)])
        os.replace(linked, path)
    log.info("kernels built for %s in %.1f s: %s", isa.name, time.monotonic() - start, path)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise BuildError(f"{command[0]} took longer than {TIMEOUT_S} s") from None
    if done.returncode:
        lines = [
            line for line in done.stderr.splitlines() if "error" in line
        ] or done.stderr.splitlines()[-1:]
        raise BuildError(
            f"{command[0]} failed: {lines[0] if lines else f'exit status {done.returncode}'}"
        )


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
