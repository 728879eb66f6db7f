#!/usr/bin/env python3
"""Print modules per folder, import circles and private words; fail beyond the limits.

`python scripts/check_structure.py` reads the packages that pyproject.toml ships. An import counts
wherever it is: at the top of a module, in a function, or under TYPE_CHECKING. The limits are in
`[tool.motet.structure]` of pyproject.toml; they only go down.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Words that hide the subject of a sentence; docs/glossary.md has the terms to use instead.
WORDS = re.compile(
    r"\b(somebody|nobody|whoever|whomever|of late|is told|are told|was told|were told|there is to say"
    r"|what there is to|who asks)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Module:
    """Hold a module's dotted name, its file, and whether it is a package's `__init__`."""

    name: str
    file: Path
    is_package: bool


def packages(root: Path = ROOT) -> list[Path]:
    """Return the folders of the packages that the wheel ships."""
    tool = tomllib.loads((root / "pyproject.toml").read_text())["tool"]
    return [root / name for name in tool["hatch"]["build"]["targets"]["wheel"]["packages"]]


def modules(folders: Iterable[Path]) -> dict[str, Module]:
    """Return all modules below the package folders by dotted name."""
    found = {}
    for folder in folders:
        for file in sorted(folder.rglob("*.py")):
            parts = list(file.relative_to(folder.parent).with_suffix("").parts)
            is_package = parts[-1] == "__init__"
            name = ".".join(parts[:-1] if is_package else parts)
            found[name] = Module(name, file, is_package)
    return found


def modules_per_folder(known: dict[str, Module]) -> Counter[str]:
    """Return the number of modules directly in each package, `__init__` left out."""
    return Counter(m.name.rpartition(".")[0] for m in known.values() if not m.is_package)


def imports(module: Module, known: dict[str, Module]) -> set[str]:
    """Return the known modules that `module` imports, wherever the import is."""
    package = module.name if module.is_package else module.name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(ast.parse(module.file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                parts = parts[: len(parts) - (node.level - 1)]
                base = ".".join([*parts, base] if base else parts)
            names = {f"{base}.{alias.name}" for alias in node.names}
            modules_named = names & known.keys()
            found |= modules_named or {base}
    # A package counts as its `__init__`: importing a submodule does not import its siblings.
    return {name for name in found if name in known and name != module.name}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for after in graph[node]:
            if after not in index:
                visit(after)
                low[node] = min(low[node], low[after])
            elif after in stack:
                low[node] = min(low[node], index[after])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    sys.setrecursionlimit(10_000)
    for node in sorted(graph):
        if node not in index:
            visit(node)
    return sorted(found)


def private_words(module: Module) -> Iterator[tuple[int, str]]:
    """Yield (line, word) for each private word in a comment or string of the module."""
    with tokenize.open(module.file) as lines:
        for token in tokenize.generate_tokens(lines.readline):
            if token.type in (tokenize.COMMENT, tokenize.STRING):
                for match in WORDS.finditer(token.string):
                    yield (
                        token.start[0] + token.string[: match.start()].count("\n"),
                        match[0].lower(),
                    )


def report(root: Path, words: bool) -> dict[str, int]:
    """Print the three counts; return them by the names of their limits."""
    known = modules(packages(root))
    sizes = modules_per_folder(known)
    print("modules per folder")
    for name, count in sizes.most_common():
        print(f"{count:5} {name}")
    found = circles({name: imports(module, known) for name, module in known.items()})
    print(f"\nimport circles: {len(found)}")
    for circle in found:
        print("      " + ", ".join(circle))
    found_words = {module.file: list(private_words(module)) for module in known.values()}
    total = sum(map(len, found_words.values()))
    print(f"\nprivate words: {total}")
    for file, places in found_words.items():
        for line, word in places if words else ():
            print(f"      {file.relative_to(root)}:{line}: {word}")
    return {"modules": max(sizes.values()), "circles": len(found), "words": total}


def main() -> int:
    """Run as a script: exit status 1 if a count exceeds its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--words", action="store_true", help="print file and line of each private word"
    )
    args = parser.parse_args()
    limits = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["motet"]["structure"]
    counts = report(ROOT, args.words)
    over = {name: count for name, count in counts.items() if count > limits[name]}
    for name, count in over.items():
        print(
            f"\nstructure: {name} is {count}, limit {limits[name]} ([tool.motet.structure])",
            file=sys.stderr,
        )
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
