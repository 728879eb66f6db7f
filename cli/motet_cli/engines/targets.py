"""Read the chain of targets of a model: engines that serve it, in the order in which they are tried."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from motet_cli.stack_file.schema import ModelTable, Setting, TargetTable
from motet_shared.errors import ConfigError

from .options import FIELDS, EngineOptions, engine_options

Flags = Callable[[Mapping[str, Setting]], list[str]]
_NAME = re.compile(r"[a-z0-9]+([-._][a-z0-9]+)*")


@dataclass(frozen=True, kw_only=True)
class Target:
    """Describe one target of a model.

    name: shown to clients; empty: the model has no chain. engine: None for Motet's own. settings:
    flags of its processes.
    """

    name: str = ""
    rank: int = 0
    engine: EngineOptions | None = None
    instances: int = 1
    settings: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """Return the command line arguments by which its processes announce it."""
        named = ["--target", self.name, "--rank", str(self.rank)] if self.name else []
        return named + ([] if self.engine is None else self.engine.arguments())


def targets_of(where: str, table: ModelTable, flags: Flags) -> tuple[Target, ...]:
    """Return the targets of a language model; one without a name where there is no chain.

    flags: function that turns settings into flags. Raises ConfigError.
    """
    if not table.targets:
        engine = engine_options(table.engine, _fields(table), f"{where}.{{}}", "_")
        return (Target(engine=engine, instances=table.instances),)
    for name in ("engine", *FIELDS):
        if getattr(table, name) not in ("motet", "", None):
            raise ConfigError(
                f"motet.toml: {where}.{name}: the model has targets; give it in one of them",
                param=f"{where}.{name}",
            )
    found = tuple(
        _target(f"{where}.targets[{rank}]", one, rank, flags)
        for rank, one in enumerate(table.targets)
    )
    names = [target.name for target in found]
    for rank, name in enumerate(names):
        if name in names[:rank]:
            raise ConfigError(
                f"motet.toml: {where}.targets[{rank}].name={name!r} is there twice; give another",
                param=f"{where}.targets[{rank}].name",
            )
    return found


def _target(where: str, table: TargetTable, rank: int, flags: Flags) -> Target:
    name = table.name or table.engine
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"motet.toml: {where}.name={name!r}: use a-z, 0-9 and single . _ -",
            param=f"{where}.name",
        )
    engine = engine_options(table.engine, _fields(table), f"{where}.{{}}", "_")
    settings = dict(table.settings)
    if "device" in settings:
        raise ConfigError(
            f"motet.toml: {where}.settings.device={settings['device']!r}: targets are placed as"
            " their model; give models.NAME.device",
            param=f"{where}.settings.device",
        )
    if table.keep_warm:
        if engine is None:
            raise ConfigError(
                f"motet.toml: {where}.keep_warm: Motet's own engine is always warm; leave it out",
                param=f"{where}.keep_warm",
            )
        settings["keep_warm"] = table.keep_warm
    return Target(
        name=name,
        rank=rank,
        engine=engine,
        instances=table.instances,
        settings=tuple(flags(settings)),
    )


def _fields(table: ModelTable | TargetTable) -> dict[str, str]:
    return {name: getattr(table, name) for name in FIELDS}
