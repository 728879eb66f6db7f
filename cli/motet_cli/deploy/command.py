"""Write the files of a deployment into a folder: `motet deploy kubernetes`, `motet deploy swarm`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from motet_cli.deploy.compose import variables
from motet_cli.deploy.kubernetes import kubernetes_files
from motet_cli.deploy.nats_topology import NatsTopology
from motet_cli.deploy.swarm import STACK_FILE, swarm_files
from motet_shared.errors import ConfigError


def run(args: Namespace) -> int:
    """Write the files, and print how they are applied."""
    folder = Path(args.folder).expanduser()
    topology = NatsTopology(
        servers=args.nats_servers, leafnodes=args.leafnodes, leaf=args.leaf or ""
    )
    if args.platform == "kubernetes":
        write(folder, kubernetes_files(_given(args.set), topology))
        print(f"{folder}: kubectl apply -k {folder}; docs/scale.md says which secrets it needs")
    else:
        write(folder, swarm_files(topology))
        print(f"{folder / STACK_FILE}: its head has the commands")
    return 0


def _given(pairs: list[str]) -> dict[str, str]:
    """Return the values of `--set`. Raises ConfigError for a variable that compose.yaml lacks."""
    known, given = variables(), {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator or name not in known:
            raise ConfigError(
                f"--set: {pair!r} sets no variable of compose.yaml; give NAME=VALUE with one of"
                f" {', '.join(sorted(known))}",
                param="--set",
            )
        if "${" in value:
            raise ConfigError(
                f"--set: the value {value!r} of {name} names a variable; give what it stands for",
                param="--set",
            )
        given[name] = value
    return given


def write(folder: Path, files: dict[str, str]) -> None:
    """Write files by name into a folder, which is created. Raises ConfigError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise ConfigError(
            f"FOLDER: cannot write {str(folder)!r}: {error.strerror}; give another", param="FOLDER"
        ) from None
