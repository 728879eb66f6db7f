"""Download models from a hub: `motet pull`."""

from __future__ import annotations

import json
from argparse import Namespace

from motet_cli.hub.download import pull
from motet_cli.hub.reference import require_reference
from motet_shared.errors import ConfigError


def run(args: Namespace) -> int:
    """Download each model and print its folder; return 0.

    With `--json`, print lines of JSON with the progress instead, and return 1 for an error.
    """
    if args.json:
        return _report(args.models)
    for given in args.models:
        reference = require_reference(given)
        print(f"{reference}  {pull(reference)}")
    return 0


def _report(models: list[str]) -> int:
    try:
        for given in models:
            reference = require_reference(given)
            _write(status="pulling manifest")

            def report(completed: int, total: int, given: str = given) -> None:
                named = {"status": f"pulling {given}", "digest": given}
                _write(**named, completed=completed, total=total)

            pull(reference, report)
    except ConfigError as error:
        _write(error=error.message)
        return 1
    _write(status="success")
    return 0


def _write(**fields: str | int) -> None:
    print(json.dumps(fields), flush=True)
