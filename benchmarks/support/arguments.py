"""Define the arguments that all benchmarks have."""

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
    """Return a parser with `--quick` and `--output`.

    quick: what `--quick` runs, for its help. The file of `--output` is `args.file`, because plans
    have a field `output` of their own.
    """
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=prog, description=description, formatter_class=form)
    parser.add_argument("--quick", action="store_true", help=f"{quick}; a smoke test")
    parser.add_argument(
        "--output", dest="file", type=Path, default=output, help="JSON file of the results"
    )
    return parser


def planned(args: argparse.Namespace, full: P, quick: P, only: Collection[str] = ()) -> P:
    """Return the plan with the fields that were given as arguments of the same name.

    only: names of the fields that arguments may set; empty: all.
    """
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
