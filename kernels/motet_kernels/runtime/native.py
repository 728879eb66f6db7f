"""Choose, load and if necessary build the native library for this CPU, on first use.

A kernel is an `extern "C"` function of csrc/, called through ctypes, which releases the GIL; it
takes pointers and sizes that its Python wrapper has checked. Where no library is available,
`Kernel.native()` is None and the wrapper calls its torch twin.

    MOTET_NATIVE   off, or an instruction set: amx, avx512bf16, avx512vnni, avx512, avx2,
                   scalar; default: the CPU's best. Automatic types follow it too (`preferred`)
    MOTET_CACHE    where libraries are kept (~/.cache/motet)
    CXX            the compiler (g++)

`python -m motet_kernels.runtime.native build [--all]` builds in advance for this CPU, or for every
CPU of its architecture.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from .build import (
    ISAS,
    BuildError,
    Isa,
    build,
    find_compiler,
    library,
    multiplies_bfloat16,
    multiplies_tiles,
    supported,
)
from .errors import KernelError

TORCH = "torch"
_Made = TypeVar("_Made")
_CTYPES: dict[str, type[ctypes._SimpleCData[Any]]] = {
    "p": ctypes.c_void_p,
    "i": ctypes.c_int64,
    "f": ctypes.c_float,
}


class _CallObserver(threading.local):
    """Hold this thread's callback for successful native calls."""

    on_call: Callable[[Kernel, tuple[object, ...]], None] | None = None


log = logging.getLogger(__name__)
_lock = threading.Lock()
_kernels: list[Kernel] = []
_library: ctypes.CDLL | None = None
_observer = _CallObserver()
_naming = False
_status: dict[str, str] | None = None


class Kernel:
    """Represent a function of the native library.

    `signature` has one letter per argument: p pointer, i int64, f float. The function returns an
    int64: 0 for success, or a code that its wrapper interprets.
    """

    def __init__(self, name: str, signature: str):
        self.name, self.signature = name, signature
        self._types = [_CTYPES[letter] for letter in signature]
        self._function: Callable[..., int] | None = None
        self._plain: Callable[..., int] | None = None
        _kernels.append(self)
        if _library is not None:
            self._bind(_library)

    def native(self) -> Callable[..., int] | None:
        """Return the C function, or None where torch computes. Loads the library on first use."""
        if _status is None:
            load()
        return (
            self._function if _observer.on_call is None or self._plain is None else self._observed
        )

    def replayed(self) -> int | None:
        """Return the address of the entry point for tapes, or None if the kernel has none."""
        entry = getattr(_library, f"{self.name}_replay", None)
        return None if entry is None else ctypes.cast(entry, ctypes.c_void_p).value

    def _observed(self, *args: object) -> int:
        assert self._plain is not None
        result = self._plain(*args)
        if result == 0 and _observer.on_call is not None:
            _observer.on_call(self, args)
        return result

    def _bind(self, library: ctypes.CDLL | None) -> None:
        self._function = self._plain = None
        if library is not None:
            function = library[self.name]
            function.argtypes = self._types
            function.restype = ctypes.c_int64
            self._function = self._plain = function

    def _named(self, *args: object) -> int:
        import torch

        assert self._plain is not None
        with torch.profiler.record_function(self.name):
            return self._plain(*args)


def load() -> dict[str, str]:
    """Load the library that `MOTET_NATIVE`, or else the CPU, selects, and return `status()`.

    Later calls do nothing.
    """
    with _lock:
        if _status is None:
            _choose(os.environ.get("MOTET_NATIVE", ""))
    return status()


def select(name: str) -> dict[str, str]:
    """Switch to another instruction set or to `off`, and return `status()`.

    No kernel may be running. The empty name is the CPU's best.
    """
    with _lock:
        _choose(name)
    return status()


def preferred() -> str:
    """Return the name of the instruction set that automatic choices follow, or `off`.

    Nothing is built or loaded. Raises `KernelError` where `MOTET_NATIVE` names one that does not
    exist or that this CPU lacks.
    """
    name = os.environ.get("MOTET_NATIVE", "")
    return name if name == "off" else _find(name).name


def will_build() -> bool:
    """Return True if `load` will compile: the library is in no cache, and there is a compiler."""
    name = preferred()
    if name == "off" or library(ISAS[name]).exists():
        return False
    try:
        find_compiler()
    except BuildError:
        return False
    return True


def why_not_native() -> str:
    """Return why kernels run on torch on this machine, or an empty text.

    Builds the library if it is in no cache.
    """
    try:
        if preferred() == "off":
            return "MOTET_NATIVE=off"
        _first_that_builds(os.environ.get("MOTET_NATIVE", ""), build)
    except BuildError as error:
        return str(error)
    return ""


def fallback() -> dict[str, float]:
    """Return `kernels_on_torch` for a heartbeat if loading left this process without the library.

    It is empty where the library is loaded, or was not asked for yet.
    """
    return {"kernels_on_torch": 1.0} if _status is not None and _status["isa"] == TORCH else {}


@contextmanager
def named_calls() -> Iterator[None]:
    """Make torch's profiler show every native call under its kernel's name, within the context."""
    global _naming
    _naming = True
    for kernel in _kernels:
        kernel._function = kernel._named if kernel._plain is not None else None
    try:
        yield
    finally:
        _naming = False
        for kernel in _kernels:
            kernel._function = kernel._plain


def naming() -> bool:
    """Return True within `named_calls`."""
    return _naming


@contextmanager
def observing_calls(on_call: Callable[[Kernel, tuple[object, ...]], None]) -> Iterator[None]:
    """Call `on_call` after every native call of this thread that succeeds, within the context."""
    _observer.on_call = on_call
    try:
        yield
    finally:
        _observer.on_call = None


def status() -> dict[str, str]:
    """Return `isa`, what kernels run on (`torch` for the twins), and `reason`.

    `reason` is why that is not the CPU's best, or empty.
    """
    return dict(_status or load())


def is_multiplying_bfloat16() -> bool:
    """Return True if the loaded library multiplies bfloat16 by instructions of the CPU."""
    return multiplies_bfloat16(status()["isa"])


def is_multiplying_tiles() -> bool:
    """Return True if the loaded library multiplies by the CPU's tile registers (AMX)."""
    return multiplies_tiles(status()["isa"])


def _choose(name: str) -> None:
    global _library, _status
    library, isa, reason = None, TORCH, ""
    try:
        if name == "off":
            reason = "MOTET_NATIVE=off"
        else:
            library, isa, reason = _first_that_builds(name, _open)
    except BuildError as error:
        reason = str(error)
        log.warning("kernels run on torch, several times slower: %s", reason)
    for kernel in _kernels:
        kernel._bind(library)
    _library, _status = library, {"isa": isa, "reason": reason}


def _first_that_builds(name: str, make: Callable[[Isa], _Made]) -> tuple[_Made, str, str]:
    """Return what `make` makes of the named instruction set, or of the best one that builds.

    With it return its name, and why it is not the CPU's best, or an empty text. Raises the first
    `BuildError` if none builds: an older compiler may know less than the CPU.
    """
    errors: list[BuildError] = []
    candidates = [_find(name)] if name else supported()
    for isa in candidates:
        try:
            made = make(isa)
        except BuildError as error:
            errors.append(error)
            continue
        reason = f"{candidates[0].name}: {errors[0]}" if errors else ""
        return made, isa.name, f"MOTET_NATIVE={name}" if name else reason
    raise errors[0]


def _find(name: str) -> Isa:
    supported_isas = supported()
    if not name:
        return supported_isas[0]
    if name not in ISAS:
        raise KernelError(f"MOTET_NATIVE: {name!r} is not one of off, {', '.join(ISAS)}")
    if ISAS[name] not in supported_isas:
        raise KernelError(
            f"MOTET_NATIVE: this CPU has no {name}; it has {', '.join(isa.name for isa in supported_isas)}"
        )
    return ISAS[name]


def _open(isa: Isa) -> ctypes.CDLL:
    import torch  # noqa: F401  (brings the OpenMP runtime that the library needs)

    path = build(isa)
    try:
        return ctypes.CDLL(str(path))
    except OSError as first:
        # This torch was built with another OpenMP runtime than GCC's.
        try:
            ctypes.CDLL("libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(path))
        except OSError:
            raise BuildError(f"cannot load {path}: {first}") from None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m motet_kernels.runtime.native", description="Build the native kernels."
    )
    parser.add_argument("command", choices=["build"])
    parser.add_argument(
        "--all",
        action="store_true",
        help="for every CPU of this architecture, not only for this one",
    )
    options = parser.parse_args(arguments)
    wanted = supported()
    if options.all:
        wanted = [isa for isa in ISAS.values() if platform.machine() == "x86_64" or not isa.needs]
    errors = dict[str, BuildError]()
    for isa in wanted:
        try:
            print(f"kernels: {build(isa)}")
        except BuildError as error:
            errors[isa.name] = error
        else:
            if not options.all:
                break
    if len(errors) == len(wanted):
        first = next(iter(errors.values()))
        print(f"kernels: not built, torch computes: {first}", file=sys.stderr)
        return 1
    for name, why in errors.items():
        print(f"kernels: {name} is not built: {why}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
