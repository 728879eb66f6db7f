"""Check settings before a reload: `python -m motet_cli.survival.settings_check FLAG…`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from motet_cli.main import up_arguments
from motet_cli.supervision.up import parse_options
from motet_cli.survival.record import StackFolder
from motet_cli.survival.session import check_survival
from motet_shared.errors import MotetError


def check(flags: Sequence[str]) -> None:
    """Raise MotetError if `motet up` would not start with these flags and motet.toml."""
    args = up_arguments(flags)
    left = None
    if args.survive:
        check_survival(args.port, args.orphan_timeout)
        left = StackFolder(args.port).read()
    parse_options(args, left)


def main() -> int:
    try:
        check(sys.argv[1:])
    except MotetError as error:
        print(error.message, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
