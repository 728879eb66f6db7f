"""What every benchmark is told on its command line."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

P = TypeVar("P")


def parser_of(
    description: str | None, quick: str, output: Path, prog: str | None = None
) -> argparse.ArgumentParser:
    """With `--quick`, of which `quick` says what it runs, and `--output`, the JSON file for the numbers.

    That is `args.file`: plans have outputs of their own.
    """
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=prog, description=description, formatter_class=form)
    parser.add_argument("--quick", action="store_true", help=f"{quick}, to see that it works")
    parser.add_argument(
        "--output", dest="file", type=Path, default=output, help="JSON file for the numbers"
    )
    return parser


def planned(args: argparse.Namespace, full: P, quick: P, only: Collection[str] = ()) -> P:
    """The plan that is asked for, with every field that an argument of the same name gives, or `only` some."""
    plan: Any = quick if args.quick else full
    names = only or [f.name for f in fields(plan)]
    given = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    return replace(
        plan,
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in given.items()
        },
    )
