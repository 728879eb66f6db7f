"""Run the benchmark named by the first argument (default: plumbing): `make bench`.

Further arguments are those of the benchmark.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def main() -> None:
    """Run the module of this name, in whichever room it is, as if it were the main module."""
    named = len(sys.argv) > 1 and not sys.argv[1].startswith("-")
    name = sys.argv.pop(1) if named else "plumbing"
    found = [path for path in _HERE.glob("*/*.py") if path.stem == name]
    if len(found) != 1:
        sys.exit(f"bench: there is no benchmark {name!r}; README.md lists them")
    sys.path.insert(0, str(_HERE.parent))
    runpy.run_module(
        f"benchmarks.{found[0].parent.name}.{name}", run_name="__main__", alter_sys=True
    )


if __name__ == "__main__":
    main()
