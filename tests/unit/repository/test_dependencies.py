"""Who may import whom, and that each extra of pyproject.toml brings what its packages import."""

import ast
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

# Package → extra that installs it, and the packages of ours that it may import.
RULES = {
    "shared/motet_shared": ("", set()),
    "shared/motet_models": ("", {"motet_shared"}),
    "shared/motet_media": ("", {"motet_shared"}),
    "shared/motet_doctor": ("", {"motet_shared", "motet_models"}),
    "shared/motet_fdstore": ("", set()),
    "kernels/motet_kernels": ("llm", set()),
    "pipelines/motet_pipelines": ("", {"motet_shared", "motet_media"}),
    "services/motet_gateway": (
        "gateway",
        {"motet_shared", "motet_media", "motet_doctor", "motet_fdstore", "motet_pipelines"},
    ),
    "services/motet_tokenizer": ("tokenizer", {"motet_shared", "motet_models"}),
    "services/motet_llm": ("llm", {"motet_shared", "motet_models", "motet_kernels"}),
    "services/motet_engines": ("engines", {"motet_shared", "motet_media", "motet_models"}),
    "services/motet_tts": ("tts", {"motet_shared", "motet_models", "motet_media", "motet_kernels"}),
    "services/motet_asr": ("asr", {"motet_shared", "motet_models", "motet_media", "motet_kernels"}),
    "services/motet_vad": ("vad", {"motet_shared", "motet_media", "motet_models"}),
    "services/motet_speakers": ("speakers", {"motet_shared", "motet_media", "motet_models"}),
    "services/motet_encoder": (
        "encoder",
        {"motet_shared", "motet_media", "motet_models", "motet_kernels"},
    ),
    "services/motet_diffusion": (
        "diffusion",
        {"motet_shared", "motet_models", "motet_media", "motet_kernels"},
    ),
    "services/motet_embedding": (
        "embedding",
        {"motet_shared", "motet_models", "motet_media", "motet_kernels"},
    ),
    "services/motet_planner": ("planner", {"motet_shared"}),
    # `motet plan` asks the planner's own simulator, `motet up` whether kernels are native.
    "cli/motet_cli": (
        "cli",
        {
            "motet_shared",
            "motet_kernels",
            "motet_media",
            "motet_models",
            "motet_doctor",
            "motet_pipelines",
            "motet_planner",
        },
    ),
    # `motet eval` runs it as a program of its own, with the engine.
    "cli/motet_evaluation": ("llm", {"motet_shared", "motet_llm"}),
}
# Imported where it is installed; without it the feature is off, and the code says so.
OPTIONAL = {
    "motet_media": {"av", "numpy", "pillow"},
    "motet_models": {"numpy", "safetensors"},
    "motet_shared": {
        "numpy",
        "opentelemetry-sdk",
        "opentelemetry-exporter-otlp-proto-http",
    },
    "motet_kernels": {"triton"},
    "motet_cli": {"matplotlib"},
    "motet_tts": {"diffusers", "snac"},
}


def imports(folder: Path) -> dict[str, str]:
    """Top-level name of every absolute import in a package → where; those for type checkers left out."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*.py")):
        for name, line in _imported(path):
            found.setdefault(name, f"{path.relative_to(ROOT)}:{line}")
    return found


def _imported(path: Path) -> Iterator[tuple[str, int]]:
    """Modules, by their absolute names, and the lines that import them."""
    for node in ast.walk(_without_type_checking(ast.parse(path.read_text()))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            spread = node.module in ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter")
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names] if spread else [node.module]
            )
            yield from ((name, node.lineno) for name in names)


def _without_type_checking(tree: ast.Module) -> ast.Module:
    class Filter(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | None:
            return (
                None
                if ast.unparse(node.test).endswith("TYPE_CHECKING")
                else self.generic_visit(node)
            )

    filtered: ast.Module = Filter().visit(tree)
    return filtered


def declared(extra: str) -> set[str]:
    lines = PROJECT["dependencies"] + (PROJECT["optional-dependencies"][extra] if extra else [])
    return {canonicalize_name(Requirement(line).name) for line in lines}


@cache
def installed() -> Mapping[str, list[str]]:
    """Top-level modules and their distributions; to read it from the files takes more than a second."""
    return packages_distributions()


def distributions(module: str) -> set[str]:
    """Which distributions may have brought a module. OpenTelemetry's share one namespace."""
    if module.startswith("opentelemetry."):
        if module.startswith("opentelemetry.sdk"):
            return {"opentelemetry-sdk"}
        if module.startswith("opentelemetry.exporter"):
            return {"opentelemetry-exporter-otlp-proto-http"}
        return {"opentelemetry-api"}
    return {canonicalize_name(name) for name in installed().get(module.partition(".")[0], [])}


@pytest.mark.parametrize("folder", RULES)
def test_imports_are_allowed_and_declared(folder: str) -> None:
    extra, ours = RULES[folder]
    package = folder.rpartition("/")[2]
    allowed = declared("") | declared(extra) | OPTIONAL.get(package, set())
    for module, where in imports(ROOT / folder).items():
        top = module.partition(".")[0]
        if top in sys.stdlib_module_names or top == package:
            continue
        if top.startswith("motet_"):
            assert top in ours, f"{where}: {package} must not import {top}"
        else:
            assert distributions(module) & allowed, (
                f"{where}: {module} is in no dependency of extra {extra or 'none'!r}"
            )


def test_only_what_runs_on_a_gpu_imports_triton() -> None:
    package = ROOT / "kernels" / "motet_kernels"
    modules = [
        path for path in package.rglob("*.py") if "gpu" not in path.relative_to(package).parts
    ]
    assert not [
        path.name
        for path in modules
        for name, _ in _imported(path)
        if name.partition(".")[0] == "triton"
    ]


@pytest.mark.parametrize("extra", ["", "gateway", "tokenizer", "vad", "speakers", "planner", "cli"])
def test_only_the_engine_brings_torch(extra: str) -> None:
    assert "torch" not in declared(extra)


def test_every_package_has_a_rule_and_is_shipped() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    here = {
        str(path.relative_to(ROOT)) for path in ROOT.glob("*/motet_*") if list(path.glob("*.py"))
    }
    shipped = set(tool["hatch"]["build"]["targets"]["wheel"]["packages"])
    models = {path for path in shipped if path.startswith("models/")}
    assert here == set(RULES) == shipped - models
    assert all((ROOT / package / "py.typed").is_file() for package in here)
    assert models == {str(path.relative_to(ROOT)) for path in ROOT.glob("models/pocket-*")}
