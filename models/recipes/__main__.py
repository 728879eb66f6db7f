"""Run one recipe's program: `python models/recipes asr.train --out models/pocket-asr`.

Further arguments are those of the program.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_PROGRAMS = ("train", "train_draft", "adapt", "evaluate", "schemas", "tasks")


def programs() -> list[str]:
    """Return the names of all programs, such as `asr.train`."""
    found = (path for path in _HERE.glob("*/*.py") if path.stem in _PROGRAMS)
    return sorted(f"{path.parent.name}.{path.stem}" for path in found)


def main() -> None:
    """Run the program that the first argument names, as if it were the main module."""
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in programs():
        sys.exit(f"recipes: there is no program {name!r}; there are {', '.join(programs())}")
    sys.path.insert(0, str(_HERE.parent))
    runpy.run_module(f"recipes.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
