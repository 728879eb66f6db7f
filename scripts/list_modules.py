"""Write the module tables of the packages' pages from the first sentence of each docstring.

.venv/bin/python scripts/list_modules.py           # writes them

.venv/bin/python scripts/list_modules.py --check   # fails if a page is out of date

A page names its packages between `<!-- modules: PACKAGE … -->` and `<!-- end of modules -->`;
`folders:` instead of `modules:` lists folders only.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "CONTRIBUTING.md",
    "cli/README.md",
    "kernels/README.md",
    "pipelines/README.md",
    "shared/README.md",
    *sorted(f"services/{path.name}/README.md" for path in (ROOT / "services").glob("motet_*")),
)
_BLOCK = re.compile(
    r"(<!-- (?P<kind>modules|folders): (?P<packages>[^>]+) -->\n).*?(<!-- end of modules -->)",
    re.DOTALL,
)


def render(page: Path) -> str:
    """Return a page with up-to-date tables. Raises ValueError for a page without any."""
    found: list[re.Match[str]] = []

    def table(block: re.Match[str]) -> str:
        found.append(block)
        packages = [ROOT / name for name in block["packages"].split()]
        rows = folders(packages) if block["kind"] == "folders" else modules(packages)
        return f"{block[1]}{chr(10).join(rows)}\n{block[4]}"

    text = _BLOCK.sub(table, page.read_text())
    if not found:
        raise ValueError(f"{page}: has no `<!-- modules: … -->` block; see {Path(__file__).name}")
    return text


def modules(packages: list[Path]) -> Iterator[str]:
    """Yield the lines of a table of all modules, by folder; paths begin in a package's parent."""
    yield from ("| module | what it does |", "|---|---|")
    for package in packages:
        for folder in _folders(package):
            name = folder.relative_to(package.parent if len(packages) > 1 else package).as_posix()
            if folder != package or len(packages) > 1:
                yield f"| **`{name}/`** | **{summary(folder / '__init__.py')}** |"
            prefix = "" if name == "." else f"{name}/"
            for path in sorted(folder.glob("*.py")):
                if not path.name.startswith("__"):
                    yield f"| `{prefix}{path.name}` | {summary(path)} |"


def folders(packages: list[Path]) -> Iterator[str]:
    """Yield the lines of a table of all folders of packages."""
    yield from ("| folder | what it does |", "|---|---|")
    for package in packages:
        for folder in _folders(package):
            yield f"| `{folder.relative_to(ROOT)}` | {summary(folder / '__init__.py')} |"


def summary(path: Path) -> str:
    """Return the first sentence of a module's docstring. Raises ValueError if it has none."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    if not docstring:
        raise ValueError(f"{path}: has no docstring; add one")
    return " ".join(docstring.split("\n\n")[0].split()).replace("|", "\\|")


def _folders(package: Path) -> list[Path]:
    return [package, *sorted(path.parent for path in package.glob("*/**/__init__.py"))]


def main() -> int:
    """Run as a script: exit status 1 if `--check` finds a stale page."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a page would change"
    )
    check = parser.parse_args().check
    stale = [page for name in PAGES if (page := ROOT / name).read_text() != render(page)]
    for page in stale:
        if check:
            print(f"{page.relative_to(ROOT)}: run scripts/list_modules.py", file=sys.stderr)
        else:
            page.write_text(render(page))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
