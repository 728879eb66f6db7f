"""Make the loader of a stack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from motet_cli.on_demand.loader import Loader, OnDemandModel
from motet_cli.on_demand.prepared import PreparedModels
from motet_cli.on_demand.residency import Model, Residency
from motet_cli.stack_file.models import DeclaredModel
from motet_cli.supervision.child import ChildSpec
from motet_cli.supervision.memory import checkpoint_bytes
from motet_cli.supervision.stack import Stack
from motet_cli.supervision.supervisor import Supervisor
from motet_models.capacity import format_bytes
from motet_models.model_config import read_config
from motet_models.video_support import makes_videos
from motet_shared.errors import ConfigError


def loader_of(
    stack: Stack,
    declared: Sequence[tuple[DeclaredModel, tuple[ChildSpec, ...]]],
    supervisor: Supervisor,
    report: Callable[[str], None],
) -> Loader:
    """Return the loader of the models that are loaded on demand."""
    models = [
        OnDemandModel(
            model=Model(
                name=one.name,
                size=one.memory * one.instances,
                keep_alive=one.keep_alive,
                follows=all(spec.forks for spec in specs),
            ),
            specs=specs,
            weights=checkpoint_bytes(one.folder.path),
            folder=one.folder.path,
            videos=makes_videos(one.folder.path),
        )
        for one, specs in declared
    ]
    most = f", {stack.max_loaded} at a time" if stack.max_loaded else ""
    report(
        f"{len(models)} models are loaded on demand, into {format_bytes(stack.on_demand_memory)}{most}"
    )
    residency = Residency((one.model for one in models), stack.on_demand_memory, stack.max_loaded)
    prepared = PreparedModels(supervisor, stack.prepared)
    return Loader(supervisor, models, residency, report, prepared)


def model_modules(folder: Path) -> list[str]:
    """Return the modules of transformers that may hold the code of a model, by its config.json."""
    try:
        config = read_config(folder)
    except ConfigError:
        return []
    nested = (part.get("model_type") for part in config.values() if isinstance(part, dict))
    kinds = [kind for kind in (config.get("model_type"), *nested) if isinstance(kind, str)]
    names = [kind.replace("-", "_") for kind in kinds]
    return [f"transformers.models.{name}.modeling_{name}" for name in names if name.isidentifier()]
