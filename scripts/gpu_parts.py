"""Define the steps of `make gpu`, the environment that they run in, and the tables of their results.

A step takes at most 8 minutes and all of them 25. Each is recorded when it ends, so that a run that
was broken off goes on behind what passed. Steps name the packages that they need: on a machine
without a network, one whose packages are absent is skipped by name, and the others run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LONGEST, ALL = 480, 1500  # seconds of a step, and of all of them
DRY = "MOTET_GPU_DRY"  # 1: tiny tensors in Triton's interpreter, which measures nothing
TESTS = ROOT / "tests" / "kernels" / "gpu"
_FAMILIES, _GRAPHS = "services/test_gpu_families.py", "services/test_gpu_graphs.py"
PACKAGES = ("torch", "triton", "transformers", "msgspec")
# Folders of packages, for a Python in which this project is not installed.
SOURCES = ("shared", "kernels", "services", "pipelines", "cli", "tests", "models", "scripts")

KERNEL = ("torch", "triton", "pytest", "hypothesis")
ENGINE = ("torch", "transformers", "safetensors", "msgspec", "llguidance")


@dataclass(frozen=True, kw_only=True)
class Step:
    """Define a command and the environment that it adds.

    seconds: its timeout; a step that is terminated has failed. needs: modules without which it is
    skipped.
    """

    name: str
    argv: Sequence[str]
    seconds: int
    env: Mapping[str, str] = field(default_factory=dict)
    needs: Sequence[str] = ()

    def missing(self) -> list[str]:
        """Return the modules that it needs and that are not installed."""
        return [name for name in self.needs if find_spec(name) is None]


def gpu_steps(env: Mapping[str, str] = os.environ) -> list[Step]:
    """Return the steps of `make gpu`; with MOTET_GPU_DRY=1 small ones that need no GPU."""
    dry = env.get(DRY) == "1"
    quick, device = (("--quick",), "cpu") if dry else ((), "cuda")
    kept = ("--folder", str(Path(gettempdir()) / "motet-gpu-dry")) if dry else ()
    kernels = ("test_gpu_norm.py", "test_gpu_kv.py") if dry else _kernels()
    engines = ("services/test_gpu_engine.py",) if dry else _services()
    tier = "--tier=all" if dry else "--tier=extended-gpu"
    chosen = ("-k", "LlamaForCausalLM and settings0") if dry else ()
    families = ("-k", "LlamaForCausalLM") if dry else ()
    graphs = ("-k", "no_graph_holds") if dry else ()
    common = {"MOTET_GPU_DEVICE": device, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": ""}
    return [
        _pytest("kernels against their twins", 330, kernels, tier, needs=KERNEL, env=common),
        _bench("configurations chosen by timing", 180, "gpu_tune", *quick, *kept, needs=KERNEL[:2]),
        _bench("kernels beside the device's limits", 200, "gpu_kernels", *quick, needs=KERNEL[:2]),
        _pytest("services on a GPU", 200, engines, tier, *chosen, needs=ENGINE, env=common),
        _pytest(
            "decode as CUDA graphs, beside launched steps",
            120,
            (_GRAPHS,),
            tier,
            *graphs,
            needs=ENGINE,
            env=common,
        ),
        _bench(
            "what CUDA graphs gain",
            90,
            "switches",
            *(("--quick", "--only", "overlap") if dry else ("--only", "cuda_graphs")),
            *("--device", device, "--pairs", "3", *(() if dry else ("--shape", "qwen3-0.6b"))),
            needs=ENGINE,
        ),
        _pytest(
            "smoke of all families",
            200,
            (_FAMILIES,),
            "--tier=extended-gpu",
            *families,
            needs=ENGINE,
            env=common,
        ),
        _bench(
            "engine beside transformers, and KV in 8 bits",
            180,
            "llm",
            *(quick or ("--device", device, "--shape", "qwen3-8b", "--concurrency", "1", "32")),
            *("--rounds", "1", "--engines"),
            *(("motet bf16", "transformers generate") if dry else ("motet", "transformers")),
            needs=ENGINE,
        ),
    ]


def _kernels() -> tuple[str, ...]:
    """Return the tests of kernels, which need no more than torch and Triton."""
    return tuple(sorted(path.name for path in TESTS.glob("test_gpu_*.py")))


def _services() -> tuple[str, ...]:
    """Return the tests of services, but for those that are steps of their own."""
    found = {f"services/{path.name}" for path in (TESTS / "services").glob("test_gpu_*.py")}
    return tuple(sorted(found - {_FAMILIES, _GRAPHS}))


def _pytest(
    name: str,
    seconds: int,
    files: Sequence[str],
    *argv: str,
    needs: Sequence[str],
    env: Mapping[str, str],
) -> Step:
    paths = [str((TESTS / file).relative_to(ROOT)) for file in files]
    options = ("-m", "pytest", "-q", "-rs", *paths, *argv)
    return Step(name=name, argv=options, seconds=seconds, needs=("pytest", *needs), env=env)


def _bench(name: str, seconds: int, benchmark: str, *argv: str, needs: Sequence[str]) -> Step:
    options = ("benchmarks/run.py", benchmark, *argv)
    return Step(name=name, argv=options, seconds=seconds, needs=needs)


def environment() -> dict[str, str]:
    """Return variables with which a Python that lacks this project's installation imports it."""
    if find_spec("motet_kernels") is not None:
        return {}
    paths = [str(ROOT / folder) for folder in SOURCES]
    return {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}


def versions() -> dict[str, str]:
    """Return the Python, the packages and the GPU of this machine; "" for what is absent."""
    found = {"python": sys.version.split()[0], "gpu": _gpu_name()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return found


def _gpu_name() -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.partition("\n")[0].strip()


def tables(document: Mapping[str, Any]) -> str:
    """Return a result as Markdown: the machine, each step, and the tables that steps printed."""
    about = document["versions"]
    lines = [
        "# On a GPU",
        "",
        f"{about['gpu'] or 'no GPU (tiny tensors in the interpreter)'}, {document['date']}, commit"
        f" {document['commit'][:12]}, Python {about['python']}, torch {about['torch']}, Triton"
        f" {about['triton']}, transformers {about['transformers']}.",
        "",
        "| step | result | seconds |",
        "|---|---|---:|",
    ]
    for step in document["steps"]:
        result = "passed" if step["passed"] else step.get("skipped") or "failed"
        lines.append(f"| {step['name']} | {result} | {step['seconds']:g} |")
    for step in document["steps"]:
        rows = [line for line in step["output"].splitlines() if line.startswith("|")]
        if rows:
            lines += ["", f"## {step['name']}", "", *rows]
    return "\n".join(lines) + "\n"
