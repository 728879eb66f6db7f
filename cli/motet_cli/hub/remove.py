"""Delete models that were downloaded from a hub: `motet remove`."""

from __future__ import annotations

from argparse import Namespace

from motet_cli.hub.download import remove
from motet_cli.hub.reference import require_reference
from motet_models.capacity import format_bytes


def run(args: Namespace) -> int:
    """Delete each model and print the freed space; return 0."""
    for given in args.models:
        reference = require_reference(given)
        print(f"{reference}  {format_bytes(remove(reference))} freed")
    return 0
