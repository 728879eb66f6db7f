"""Describe what other hosts may run of a stack, and what it takes: the offer of the first host."""

from __future__ import annotations

import hashlib
import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from motet_cli.checkpoints import model_folders
from motet_cli.checkpoints.model_folders import ModelFolder
from motet_cli.joining.messages import ModelOffer, ServiceOffer, StackOffer
from motet_cli.placement.jobs import option_of
from motet_cli.planning.engine_memory import CPU_OVERHEAD, engine_plan
from motet_cli.stack_file.arguments import stack_file_of
from motet_cli.stack_file.models import DeclaredModel
from motet_cli.stack_file.schema import ModelTable, RoleTable, StackFile
from motet_cli.supervision.child import ChildSpec
from motet_cli.supervision.memory import checkpoint_bytes
from motet_cli.supervision.stack import FIXED, Stack
from motet_shared.errors import ConfigError

# They belong to the first host: clients and operators reach them there.
_FIRST_HOST = frozenset({"gateway", "planner", *FIXED})
LANGUAGE = frozenset({"decode", "prefill", "encoder"})  # roles that read a language model's folder
_ENGINES = frozenset({"decode", "prefill"})
_WITHOUT_MODEL = frozenset({"tokenizer", "vad"})
_EDGE = 1 << 20  # bytes of a file of weights that its digest covers, at its beginning
_UNLIMITED = 1 << 50  # bytes
_OPTIONAL = {"asr": "asr", "tts": "tts", "speakers": "speakers", "diffusion": "draw"} | {
    "embedding": "embed",
    "ranking": "rank",
}  # flag of each role with one model


def stack_offer(args: Namespace, stack: Stack) -> StackOffer:
    """Return what other hosts may run of the stack of a command line, in the order of its list.

    What cannot be told by names is left out: engines elsewhere, omni models, adapters' folders, and
    tokenizers with templates or sampling settings from files of this host.
    """
    models = dict(_models(args, stack))
    services: dict[tuple[str, str | None], ServiceOffer] = {}
    for spec in stack.services():
        key = _key(spec)
        if spec.role in _FIRST_HOST or option_of(spec.argv, "--engine"):
            continue
        if spec.role in _WITHOUT_MODEL:
            if spec.role != "tokenizer" or _is_portable(args, stack):
                services[spec.role, None] = ServiceOffer(spec.role, memory=CPU_OVERHEAD)
        elif key in models:
            services[spec.role, key] = ServiceOffer(spec.role, key, least_memory(spec))
    return StackOffer(tuple(services.values()), models, tuple(_flags(args, stack)), _file(args))


def model_key(role: str, name: str) -> str:
    """Return the key of a model in an offer: models of different kinds may have one name."""
    return f"{'decode' if role in LANGUAGE else role}/{name}"


def _key(spec: ChildSpec) -> str:
    return model_key(spec.role, spec.model or "")


def _models(args: Namespace, stack: Stack) -> Iterator[tuple[str, ModelOffer]]:
    given = args.llm or ([model_folders.DEFAULT_LLM] if stack.models else [])
    for source, model in zip(given, stack.models, strict=True):
        yield model_key("decode", model.name), _model(source, model)
    for role, flag in _OPTIONAL.items():
        found: ModelFolder | None = getattr(stack, flag)
        if found is not None:
            yield model_key(role, found.name), _model(getattr(args, flag) or found.name, found)
    tables = stack_file_of(args).models
    for one in stack.at_start:
        if _is_own(one):
            source = tables[one.name].source or one.name
            offer = replace(_model(source, one.folder), declared=True)
            yield model_key(one.role, one.name), offer


def _model(source: str, model: ModelFolder) -> ModelOffer:
    _, separator, rest = source.partition("=")
    if separator and not Path(source).expanduser().exists():
        source = rest
    path = Path(source).expanduser()
    if path.exists() and (os.sep in source or not model_folders.find_checkpoint(source)):
        source = str(path.resolve())
    return ModelOffer(model.name, source, files_digest(model.path))


def files_digest(folder: Path) -> str:
    """Return a digest of a model's configuration, tokenizer and weights.

    Of each file of weights it covers the name, the size and the first MiB, in which safetensors and
    GGUF have their tensors' names, types and shapes.
    """
    found = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = str(path.relative_to(folder))
        if path.suffix in (".safetensors", ".gguf"):
            with path.open("rb") as file:
                part = file.read(_EDGE)
        elif path.name in ("config.json", "tokenizer.json", "model_index.json"):
            part = path.read_bytes()
        else:
            continue
        found.update(f"{name}\0{path.stat().st_size}\0".encode() + part)
    return found.hexdigest()


def least_memory(spec: ChildSpec) -> int:
    """Return the bytes that a process needs on a CPU: an engine's with room for one sequence."""
    folder = Path(option_of(spec.argv, "--model"))
    if spec.role in _ENGINES:
        from motet_cli.main import parser  # it imports the commands' arguments

        try:
            found = engine_plan(parser().parse_args(["plan", str(folder)]), folder, _UNLIMITED)
        except ConfigError:  # a model that `motet plan` cannot count
            pass
        else:
            return found.used - found.kv + found.per_sequence + found.block_bytes
    return CPU_OVERHEAD + checkpoint_bytes(folder)


def _is_portable(args: Namespace, stack: Stack) -> bool:
    """Return True if tokenizers need no file of this host besides those of the models."""
    templates = stack.chat_templates or [one for one in stack.declared if one.chat_template]
    return not templates and stack.generation_config in (None, "auto", "none")


def _is_own(model: DeclaredModel) -> bool:
    """Return True if all processes of a model compute with Motet's own engine."""
    return all(target.engine is None and not target.name for target in model.targets)


def _flags(args: Namespace, stack: Stack) -> Iterator[str]:
    for flag, degree in stack.parallel.items():
        yield f"{flag}={degree}"
    if args.speculate:
        yield f"--speculate={args.speculate}"
    if stack.generation_config in ("auto", "none"):
        yield f"--generation-config={stack.generation_config}"
    for adapter in args.adapter:
        yield f"--adapter={adapter}"


def _file(args: Namespace) -> StackFile:
    """Return what motet.toml says of roles and models, without what is of this host alone."""
    file = stack_file_of(args)
    roles = {
        name: RoleTable(settings={k: v for k, v in table.settings.items() if k != "device"})
        for name, table in file.roles.items()
    }
    tables = {
        name: _portable(table)
        for name, table in file.models.items()
        if table.load == "at start" and not table.targets and table.engine == "motet"
    }
    return StackFile(roles=roles, models=tables)


def _portable(table: ModelTable) -> ModelTable:
    settings = {name: value for name, value in table.settings.items() if name != "device"}
    return replace(table, device=None, memory=0, chat_template=None, settings=settings)
