"""The structure check finds circles, crowded folders and private words, and this tree keeps its limits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import check_structure
from check_structure import circles, imports, modules, modules_per_folder, private_words

ROOT = Path(check_structure.__file__).parents[1]


def package(folder: Path, **files: str) -> Path:
    home = folder / "pack"
    home.mkdir()
    (home / "__init__.py").write_text('"""A package."""\n')
    for name, text in files.items():
        (home / f"{name}.py").write_text(text)
    return home


def test_imports_in_functions_and_under_type_checking_make_circles(tmp_path: Path) -> None:
    home = package(
        tmp_path,
        one="def f():\n    from .two import g\n",
        two="from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pack.one import f\n",
        three="from . import one\n",
    )
    known = modules([home])
    graph = {name: imports(module, known) for name, module in known.items()}
    assert graph["pack.three"] == {"pack.one"}
    assert circles(graph) == [["pack.one", "pack.two"]]


def test_modules_are_counted_by_folder(tmp_path: Path) -> None:
    home = package(tmp_path, one="", two="")
    assert modules_per_folder(modules([home])) == {"pack": 2}


def test_private_words_are_found_in_docstrings_and_comments_alone(tmp_path: Path) -> None:
    text = '"""Tell\nsomebody."""\n# Nobody knows.\nnobody = 1\n'
    known = modules([package(tmp_path, one=text)])
    assert list(private_words(known["pack.one"])) == [(2, "somebody"), (3, "nobody")]


def test_this_tree_keeps_its_limits() -> None:
    done = subprocess.run(
        [sys.executable, check_structure.__file__], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
