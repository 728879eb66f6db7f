"""How the native library is chosen, built, shared and done without."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from motet_kernels.runtime import build, native
from motet_kernels.runtime.errors import KernelError
from support.running.refusals import refuses

SCALAR = build.ISAS["scalar"]
ATTEND = """
import json, sys
from motet_kernels.runtime import native
assert "torch" not in sys.modules
import torch
from motet_kernels.attention.paged_batch import PagedBatch
from motet_kernels.attention.paged_attention import paged_attention
batch = PagedBatch(*(torch.tensor(x, dtype=torch.int32) for x in ([[0]], [0, 1], [1])))
cache = torch.ones(1, 1, 4, 8)
out = paged_attention(torch.ones(1, 2, 8), cache, cache, batch, scale=1.0)
print(json.dumps(native.status() | {"sum": out.sum().item()}))
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources that compile in no time, an empty cache, and a compiler that notes each call in the file returned."""
    sources, calls, compiler = tmp_path / "csrc", tmp_path / "calls", tmp_path / "compiler"
    sources.mkdir()
    (sources / "five.cpp").write_text(
        'extern "C" __attribute__((visibility("default"))) long five() { return 5; }\n'
    )
    compiler.write_text(f'#!/bin/sh\necho "$@" >>{calls}\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    calls.touch()
    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setenv("MOTET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(compiler))
    return calls


def attend(**environment: str) -> dict[str, object]:
    """What a fresh process says after its first kernel."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", ATTEND], env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    says: dict[str, object] = json.loads(done.stdout)
    return says


@pytest.mark.automatic
def test_the_best_that_this_cpu_has_is_used() -> None:
    assert native.select("") == {"isa": build.supported()[0].name, "reason": ""}
    assert [isa.name for isa in build.supported()][-1] == "scalar"


@pytest.mark.parametrize("granted", [True, False])
def test_amx_is_used_where_linux_grants_its_registers(
    granted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = " ".join(frozenset[str]().union(*(isa.needs for isa in build.ISAS.values())))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(Path, "read_text", lambda self: f"flags\t\t: fpu {flags}\n")
    monkeypatch.setattr(build, "_request_tiles", lambda: granted)
    best = "amx" if granted else "avx512bf16"
    assert build.supported()[0].name == best


def test_one_may_be_asked_for() -> None:
    assert attend(MOTET_NATIVE="scalar") == {
        "isa": "scalar",
        "reason": "MOTET_NATIVE=scalar",
        "sum": 16.0,
    }


def test_off_is_torch() -> None:
    assert attend(MOTET_NATIVE="off") == {"isa": "torch", "reason": "MOTET_NATIVE=off", "sum": 16.0}


def test_without_a_compiler_torch_computes_and_the_reason_is_kept(tmp_path: Path) -> None:
    says = attend(MOTET_CACHE=str(tmp_path), PATH=str(tmp_path), CXX="")
    assert says == {"isa": "torch", "reason": "no C++ compiler (install g++)", "sum": 16.0}


def test_a_wrong_name_is_refused() -> None:
    with refuses(KernelError, "MOTET_NATIVE"):
        native.select("sse")


def test_what_the_cpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "supported", lambda: [SCALAR])
    with refuses(KernelError, "MOTET_NATIVE"):
        native.select("avx2")


def test_a_shortfall_is_told_with_its_cause(tmp_path: Path) -> None:
    looks = "native.fallback(), native.why_not_native(), native.load()['isa'], native.fallback()"
    code = f"from motet_kernels.runtime import native; print(repr(({looks})))"
    bare = os.environ | {"MOTET_CACHE": str(tmp_path), "PATH": str(tmp_path), "CXX": ""}
    told = subprocess.check_output([sys.executable, "-c", code], env=bare, text=True)
    assert told.strip().splitlines()[-1] == repr(
        ({}, "no C++ compiler (install g++)", "torch", {"kernels_on_torch": 1.0})
    )


def test_a_compiler_that_fails_is_a_reason(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (build.SOURCES / "bad.cpp").write_text("this is no program\n")
    monkeypatch.setattr(native, "supported", lambda: [SCALAR])
    try:
        status = native.select("")
        assert status["isa"] == "torch"
        assert "compiler failed: " in status["reason"]
        assert "bad.cpp:1:1: error:" in status["reason"]
    finally:
        monkeypatch.undo()
        native.select("")


def test_a_compiler_that_knows_less_than_the_cpu_builds_the_next_best(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = build.Isa("newest", frozenset(), "-mof-another-decade")
    monkeypatch.setattr(native, "supported", lambda: [newest, SCALAR])
    made, isa, reason = native._first_that_builds("", build.build)
    assert (made, isa) == (build.library(SCALAR), "scalar")
    assert reason.startswith("newest: ")
    assert "-mof-another-decade" in reason


def test_a_cache_that_cannot_be_written_is_a_reason(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTET_CACHE", "/proc/none")
    with pytest.raises(build.BuildError, match="MOTET_CACHE"):
        build.build(SCALAR)


def test_a_library_is_built_once_however_many_ask(small: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = set(pool.map(build.build, [SCALAR] * 4))
    assert len(paths) == 1
    assert ctypes.CDLL(str(paths.pop())).five() == 5
    assert len(small.read_text().splitlines()) == 2  # compile, link


def test_a_built_library_needs_no_compiler(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build.build(SCALAR)
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")
    assert build.build(SCALAR) == path


def test_other_sources_are_another_library(small: Path) -> None:
    first = build.library(SCALAR)
    (build.SOURCES / "simd.h").write_text("// more\n")
    assert build.library(SCALAR) != first


@pytest.mark.parametrize(
    ("arguments", "libraries"), [(["build"], 1), (["build", "--all"], len(build.ISAS))]
)
def test_building_ahead(
    small: Path,
    arguments: list[str],
    libraries: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert native.main(arguments) == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == libraries
    assert all(Path(line.partition(": ")[2]).exists() for line in printed)


def test_building_ahead_without_a_compiler_says_so(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")
    assert native.main(["build"]) == 1
    assert "torch computes: no C++ compiler (install g++)" in capsys.readouterr().err
