"""Turn the models of motet.toml into folders, sizes and processes' arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from motet_cli.checkpoints import model_folders
from motet_cli.checkpoints.model_folders import ModelFolder
from motet_cli.engines.options import FIELDS
from motet_cli.engines.targets import Target, targets_of
from motet_cli.stack_file.read import bytes_of, seconds_of
from motet_cli.stack_file.schema import ModelTable, RoleTable, Setting, StackFile
from motet_cli.supervision.memory import checkpoint_bytes
from motet_shared.errors import ConfigError

# Beyond the weights: a step's intermediates, caches, and buffers of libraries.
_BESIDES_WEIGHTS = 0.25  # share of the weights
_LEAST_BESIDES = 512 * 2**20  # bytes

_DEVICE = "device"

SERVICE_OF = {  # role of the service that serves a role of the file
    "llm": "decode",
    "asr": "asr",
    "tts": "tts",
    "embed": "embedding",
    "rank": "ranking",
    "draw": "diffusion",
    "speakers": "speakers",
}


@dataclass(frozen=True, kw_only=True)
class DeclaredModel:
    """Describe a model of motet.toml.

    role: role of its service, such as `decode`.
    memory: bytes that it may use; is_bounded: the file sets them, else they are estimated.
    settings: flags of its processes. targets: engines of a language model, in order of trial.
    device: as `--device`; "": that of its role.
    """

    folder: ModelFolder
    role: str
    on_demand: bool
    keep_alive: float
    memory: int
    is_bounded: bool
    instances: int
    chat_template: str | None
    settings: tuple[str, ...]
    targets: tuple[Target, ...] = (Target(),)
    device: str = ""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def own_instances(self) -> int:
        """Return the number of its processes that hold its weights."""
        if self.role != "decode":
            return self.instances
        return sum(target.instances for target in self.targets if target.engine is None)


def declared_models(file: StackFile) -> tuple[DeclaredModel, ...]:
    """Return the models of a file, downloading those of a hub. Raises ConfigError."""
    return tuple(_declared(file, name, table) for name, table in file.models.items())


def film_model(file: StackFile, given: str | None) -> tuple[DeclaredModel, ...]:
    """Return the model of `--film`, which is loaded on demand, on the CPU; none for "none".

    The default is left out where a file has models on demand, whose memory it would share.
    """
    if given is None and any(table.load == "on demand" for table in file.models.values()):
        return ()
    folder = model_folders.resolve_film(given)
    if folder is None or folder.name in file.models:
        return ()
    table = ModelTable(source=str(folder.path), role="draw", load="on demand", device="cpu")
    return (_declared(file, folder.name, table),)


def _declared(file: StackFile, name: str, table: ModelTable) -> DeclaredModel:
    where = f"models.{name}"
    folder = ModelFolder(name, _folder(where, table.source or name, table.role))
    weights = checkpoint_bytes(folder.path)
    given = bytes_of(f"{where}.memory", table.memory)
    targets = _targets(where, table)
    keep_alive = file.on_demand.keep_alive if table.keep_alive is None else table.keep_alive
    return DeclaredModel(
        folder=folder,
        role=SERVICE_OF[table.role],
        on_demand=table.load == "on demand",
        keep_alive=seconds_of(f"{where}.keep_alive", keep_alive),
        memory=given or weights + max(int(weights * _BESIDES_WEIGHTS), _LEAST_BESIDES),
        is_bounded=bool(given),
        instances=table.instances,
        chat_template=_template(where, table.chat_template),
        settings=tuple(flags(table.settings)),
        targets=targets,
        device=device_of(table),
    )


def _targets(where: str, table: ModelTable) -> tuple[Target, ...]:
    if table.role != "llm":
        for name in ("engine", *FIELDS, "targets"):
            if getattr(table, name) not in ("motet", "", []):
                raise ConfigError(
                    f"motet.toml: {where}.{name}: is for language models; leave it out, or give"
                    ' role = "llm"',
                    param=f"{where}.{name}",
                )
        return (Target(),)
    found = targets_of(where, table, flags)
    if table.load == "on demand" and any(target.engine is not None for target in found):
        raise ConfigError(
            f'motet.toml: {where}.load: models on demand are computed by engine = "motet" alone;'
            ' give "at start"',
            param=f"{where}.load",
        )
    return found


def _folder(where: str, source: str, role: str) -> Path:
    resolvers: Mapping[str, Callable[[str], ModelFolder | None]] = {
        "llm": model_folders.resolve,
        "draw": model_folders.resolve_drawing,
    }

    def other(given: str) -> ModelFolder | None:
        return model_folders.resolve_optional(given, f"--{role}", given)

    try:
        found = resolvers.get(role, other)(source)
    except ConfigError as error:
        raise ConfigError(
            f"motet.toml: {where}: {error.message}", param=f"{where}.source"
        ) from None
    if found is None:
        raise ConfigError(
            f"motet.toml: {where}.source={source!r} is no model; give a folder or org/name",
            param=f"{where}.source",
        )
    return found.path


def _template(where: str, given: str | None) -> str | None:
    if given is None:
        return None
    path = Path(given).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"motet.toml: {where}.chat_template={given!r} is no file; give one with a Jinja template",
            param=f"{where}.chat_template",
        )
    return str(path.resolve())


def device_of(table: ModelTable | RoleTable) -> str:
    """Return the device of a table, which may also be among its settings; "" without one."""
    return table.device or str(table.settings.get(_DEVICE, ""))


def flags(settings: Mapping[str, Setting]) -> list[str]:
    """Return settings as flags of a process; a list repeats its flag.

    The device is none of them: each process gets its own when it is placed.
    """
    found = []
    for name, value in settings.items():
        if name == _DEVICE:
            continue
        for one in value if isinstance(value, list) else [value]:
            text = str(one).lower() if isinstance(one, bool) else str(one)
            found.append(f"--{name.replace('_', '-')}={text}")
    return found


def role_flags(roles: Mapping[str, RoleTable]) -> dict[str, tuple[str, ...]]:
    """Return the flags of each role."""
    return {role: tuple(flags(table.settings)) for role, table in roles.items()}
