"""List the models that are served, local, or downloaded from a hub: `motet models`."""

from __future__ import annotations

from argparse import Namespace

from motet_cli.checkpoints.model_folders import local_models
from motet_cli.commands.server import Listed, Server, read_key
from motet_cli.hub.download import cached_models
from motet_models.capacity import format_bytes
from motet_shared.errors import MotetError


def run(args: Namespace) -> int:
    """Print all models; return 0 also without a server, since local models are listed anyway."""
    try:
        with Server(args.url, read_key(args.api_key_file)) as server:
            print(f"served at {server.url}:")
            _print_column([_line(model) for model in server.listed()] or ["(none yet)"])
    except MotetError as error:
        _print_column([f"({error.message})"])
    print("local folders:")
    _print_column(
        [f"{model.name}  {model.path}" for model in local_models()] or ["(none; see MOTET_MODELS)"]
    )
    print("downloaded from a hub:")
    _print_column(
        [f"{name}  {format_bytes(size)}" for name, size in cached_models()]
        or ["(none; see `motet pull`)"]
    )
    return 0


def _line(model: Listed) -> str:
    """Return name, kind and status of a model: `pocket-draw  (image, starting)`."""
    kind = f"adapter of {model.parent}" if model.parent else model.kind
    return f"{model.name}  ({kind}, {model.status})"


def _print_column(lines: list[str]) -> None:
    for line in lines:
        print(f"  {line}")
