"""Run the benchmark named by the first argument (default: plumbing): `make bench`.

Further arguments are those of the benchmark.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    named = len(sys.argv) > 1 and not sys.argv[1].startswith("-")
    name = sys.argv.pop(1) if named else "plumbing"
    script = Path(__file__).with_name(f"{name}.py")
    if not script.is_file():
        sys.exit(f"bench: there is no benchmark {name!r}; README.md lists them")
    runpy.run_path(str(script), run_name="__main__")
