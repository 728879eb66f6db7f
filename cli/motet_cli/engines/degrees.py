"""Read the degrees of the groups of ranks that compute language models: `--tensor-parallel` etc."""

from __future__ import annotations

import argparse
from argparse import Namespace

from motet_models.ranks import Ranks
from motet_shared.errors import ConfigError

# What the ranks of a group share, by the flag of its degree.
PARALLEL = {
    "--tensor-parallel": "each matrix and the heads of attention",
    "--pipeline-parallel": "the layers, in stages",
    "--expert-parallel": "the experts",
}


def add_degrees(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add the flags of the degrees to a command's parser."""
    for flag, shared in PARALLEL.items():
        parser.add_argument(
            flag,
            metavar="N",
            type=int,
            default=1,
            help=f"ranks (processes) of each language model's worker that share {shared} (default: 1)",
        )


def parse_degrees(args: Namespace) -> dict[str, int]:
    """Return the degrees above 1 by their flags. Raises ConfigError."""
    given = {flag: getattr(args, flag[2:].replace("-", "_")) for flag in PARALLEL}
    for flag, degree in given.items():
        if degree < 1:
            raise ConfigError(f"{flag}: {degree} is too few; give at least 1", param=flag)
    return {flag: degree for flag, degree in given.items() if degree > 1}


def parse_ranks(args: Namespace) -> Ranks:
    """Return the group that the flags ask for. Raises ConfigError."""
    degrees = parse_degrees(args)
    tensor, pipeline, expert = (degrees.get(flag, 1) for flag in PARALLEL)
    if min(tensor, expert) > 1 and tensor != expert:
        raise ConfigError(
            f"--expert-parallel: {expert}: the ranks that share matrices share the experts; give"
            f" {tensor}, as --tensor-parallel, or 1",
            param="--expert-parallel",
        )
    return Ranks(tensor=tensor, pipeline=pipeline, expert=expert)
