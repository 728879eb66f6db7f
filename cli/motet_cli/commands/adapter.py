"""Load and unload LoRA adapters of a running server: `motet adapter`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

from motet_cli.checkpoints.model_folders import resolve_adapters
from motet_cli.commands.server import Server, read_key


def run(args: Namespace) -> int:
    """Carry out `load` or `unload`; a hub's adapter is downloaded first, on this machine."""
    with Server(args.url, read_key(args.api_key_file)) as server:
        if args.action == "unload":
            server.unload_adapter(args.name)
            print(f"{args.name} is served no longer")
            return 0
        (found,) = resolve_adapters([f"{args.name}={args.source}"], 1)
        name, _, folder = found.partition("=")
        server.load_adapter(name, Path(folder))
        print(f"{name} is served")
    return 0
