"""`motet models`: what the server serves, and which folders `motet up --llm` could."""

from __future__ import annotations

from argparse import Namespace

from motet_cli.models import local_models
from motet_cli.server import Server, read_key
from motet_shared.errors import MotetError


def run(args: Namespace) -> int:
    """0 also without a server: the local folders are an answer too."""
    try:
        with Server(args.url, read_key(args.api_key_file)) as server:
            print(f"served at {server.url}:")
            others = [f"{name}  ({kind})" for kind in ("speech", "transcription") for name in server.models(kind)]
            chat = [f"{name}  (adapter of {base})" if base else name for name, base in server.parents().items()]
            _print_column(chat + others or ["(none yet)"])
    except MotetError as error:
        _print_column([f"({error.message})"])
    print("local folders:")
    _print_column([f"{model.name}  {model.path}" for model in local_models()] or ["(none; see MOTET_MODELS)"])
    return 0


def _print_column(lines: list[str]) -> None:
    for line in lines:
        print(f"  {line}")
