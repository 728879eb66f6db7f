"""Make a checkpoint folder of a GGUF file: `python -m motet_llm.weights.gguf FILE [TARGET]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from motet_shared.errors import ConfigError

from .folder import default_folder, make_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Print the folder; return 2 with the reason on stderr if the file cannot be served."""
    parser = argparse.ArgumentParser(prog="motet_llm.weights.gguf", description=__doc__)
    parser.add_argument("file", type=Path, help="the GGUF file, or the first part of a split one")
    parser.add_argument("target", type=Path, nargs="?", help="the folder (under MOTET_CACHE)")
    args = parser.parse_args(argv)
    try:
        print(make_folder(args.file, args.target or default_folder(args.file)))
    except ConfigError as error:
        print(error.message, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
