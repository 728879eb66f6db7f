"""Download models from a hub: `motet pull`."""

from __future__ import annotations

from argparse import Namespace

from motet_cli.hub.download import pull
from motet_cli.hub.reference import require_reference


def run(args: Namespace) -> int:
    """Download each model and print its folder; return 0."""
    for given in args.models:
        reference = require_reference(given)
        print(f"{reference}  {pull(reference)}")
    return 0
