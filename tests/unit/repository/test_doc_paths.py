"""What the pages name exists: files, modules, links and their headings; and their tables are up to date."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

import list_modules

ROOT = Path(__file__).parents[3]
# The changelog tells of what was, and the list of families is written by a script.
PAST = {"CHANGELOG.md", "docs/models.md", "docs/releases/0.2.0.md"}
# A project, and a folder that runs make.
ELSEWHERE = {"llama.cpp", "benchmarks/results/"}
SUFFIXES = "py|md|conf|cpp|h|js|mjs|sh"
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FILE = re.compile(rf"[\w./-]+\.(?:{SUFFIXES})|(?:[\w.-]+/)+")
DOTTED = re.compile(r"motet_\w+(?:\.(?!py\b)\w+)+")
# `Class.member`, alone or at the end of a dotted name.
MEMBER = re.compile(r"(?:`|`[\w.]+\.)([A-Z]\w+)\.([a-z_]\w*)(?:\(\))?`")
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s#]*)(?:#([^)\s]+))?\)")
CONFLICT = re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


@cache
def tracked() -> tuple[str, ...]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return tuple(name for name in listed.stdout.splitlines() if (ROOT / name).is_file())


PAGES = [name for name in tracked() if name.endswith(".md") and name not in PAST]


@cache
def paths() -> frozenset[str]:
    """Every file and folder of the tree, each by every end of its path: a page may leave out its beginning."""
    found = set()
    for name in tracked():
        parts = name.split("/")
        for end in range(1, len(parts) + 1):
            found |= {"/".join(parts[start:end]) for start in range(end)}
    return frozenset(found)


@cache
def anchors(page: Path) -> frozenset[str]:
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return frozenset(
        re.sub(r"[^\w\- ]", "", heading.lower().replace("`", "")).replace(" ", "-")
        for heading in headings
    )


def named_files(text: str) -> set[str]:
    """Files and folders in code spans; a placeholder such as NAME or * makes it an example."""
    spans = {span.rstrip(":") for span in CODE.findall(FENCE.sub("", text))}
    return {
        span
        for span in spans
        if FILE.fullmatch(span)
        and not re.search(r"[A-Z]{3,}", span)
        and span not in ELSEWHERE
        and not span.startswith(".cache/")
    }


def exists(module: str) -> bool:
    """Whether a dotted name is a module of ours, or what a module defines."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        *folders, last = parts[:end]
        found = [
            path
            for top in ("shared", "kernels", "services", "pipelines", "cli")
            for path in (
                ROOT.joinpath(top, *folders, f"{last}.py"),
                ROOT.joinpath(top, *folders, last, "__init__.py"),
            )
            if path.is_file()
        ]
        if found:
            source = found[0].read_text()
            return all(re.search(rf"\b{name}\b", source) for name in parts[end:])
    return False


def test_no_merge_has_left_its_marks() -> None:
    """Neither pages nor sources hold the two sides of a conflict."""
    suffixes = (*tuple(f".{name}" for name in SUFFIXES.split("|")), ".toml", ".yaml", ".txt")
    marked = [
        name
        for name in tracked()
        if name.endswith(suffixes) and CONFLICT.search((ROOT / name).read_text(errors="replace"))
    ]
    assert marked == []


@pytest.mark.parametrize("page", PAGES)
def test_named_files_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    missing = {name for name in named_files(text) if name.strip("./") not in paths()}
    assert missing == set()


@pytest.mark.parametrize("page", PAGES)
def test_named_modules_exist(page: str) -> None:
    text = FENCE.sub("", (ROOT / page).read_text())
    assert {name for name in DOTTED.findall(text) if not exists(name)} == set()


@cache
def members() -> dict[str, set[str]]:
    """Return the attributes of each class of the packages, inherited ones included, by its name.

    Classes of one name are taken together.
    """
    own: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for top in ("shared", "kernels", "services", "pipelines", "cli"):
        for path in (ROOT / top).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    own.setdefault(node.name, set()).update(_attributes(node))
                    bases.setdefault(node.name, set()).update(
                        ast.unparse(base).rpartition(".")[2] for base in node.bases
                    )
    for _ in range(6):  # levels of inheritance
        for name, parents in bases.items():
            own[name].update(*(own.get(parent, set()) for parent in parents))
    return own


def _attributes(node: ast.ClassDef) -> set[str]:
    found = set()
    for inner in ast.walk(node):
        match inner:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                found.add(name)
    return found


def unknown_members(text: str) -> set[str]:
    """Return the `Class.member` names of a page whose class is one of ours and has no such member."""
    named = MEMBER.findall(FENCE.sub("", text))
    return {
        f"{owner}.{name}"
        for owner, name in named
        if owner in members() and name not in members()[owner]
    }


@pytest.mark.parametrize("page", PAGES)
def test_named_members_exist(page: str) -> None:
    assert unknown_members((ROOT / page).read_text()) == set()


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    here = ROOT / page
    for path, anchor in LINK.findall(FENCE.sub("", here.read_text())):
        target = (here.parent / path).resolve() if path else here
        assert target.exists(), path
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{path}#{anchor}"


@pytest.mark.parametrize("page", list_modules.PAGES)
def test_tables_of_modules_are_current(page: str) -> None:
    """Run scripts/list_modules.py where this fails."""
    assert (ROOT / page).read_text() == list_modules.render(ROOT / page)


def test_every_package_has_a_page_and_the_index_links_every_page_of_docs() -> None:
    for service in (ROOT / "services").glob("motet_*"):
        assert (service / "README.md").is_file(), service.name
    index = (ROOT / "docs/README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index, page.name
    assert "docs/README.md" in (ROOT / "README.md").read_text()


def test_what_does_not_exist_would_be_noticed() -> None:
    assert named_files("see `shared/nothing.py` and `NAME.py`") == {"shared/nothing.py"}
    assert "shared/nothing.py" not in paths()
    assert exists("motet_shared.wire.call.Call.send")
    assert not exists("motet_shared.wire.telephone")
    assert unknown_members("`Call.send` and `Call.sing`, or `Elsewhere.sing`") == {"Call.sing"}
