#!/usr/bin/env python3
"""Copy the page's libraries out of their npm packages, at the versions named here, with their licences.

    scripts/vendor_page.py            fetch the packages with npm and write the files
    scripts/vendor_page.py --check    report files that differ, and write nothing

The files are committed, so that neither users nor tests need npm. Exit code 1: files differ.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "services/motet_gateway/web/static/vendor"
TESTS = ROOT / "tests/support/javascript/vendor"
_SOURCE_MAP = re.compile(rb"\n?//# sourceMappingURL=\S+\s*$")


@dataclass(frozen=True)
class Package:
    """Name an npm package and the file that is taken from it."""

    name: str
    version: str
    member: str  # path in the package
    target: Path
    licence: str = "LICENSE"

    @property
    def licence_target(self) -> Path:
        return self.target.with_name(self.target.name.split(".")[0] + ".LICENSE.txt")


PACKAGES = (
    Package("markdown-it", "15.0.3", "dist/browser/markdown-it.umd.min.js", PAGE / "markdown-it.min.js"),
    Package("dompurify", "3.4.18", "dist/purify.min.js", PAGE / "purify.min.js"),
    Package("@highlightjs/cdn-assets", "11.12.0", "es/highlight.min.js", PAGE / "highlight.min.js"),
    Package("katex", "0.19.1", "dist/katex.min.js", PAGE / "katex.min.js"),
    Package("axe-core", "4.14.1", "axe.min.js", TESTS / "axe.min.js"),
    Package("@fontsource/inter", "5.3.0", "files/inter-latin-400-normal.woff2", TESTS / "inter.woff2"),
)  # fmt: skip


def files_of(package: Package, folder: Path) -> dict[Path, bytes]:
    """Fetch a package into `folder`; return the contents of its file and of its licence."""
    command = ["npm", "pack", f"{package.name}@{package.version}", "--json", "--silent"]
    packed = subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True, timeout=300
    )
    listed = json.loads(packed.stdout)
    (entry,) = listed.values() if isinstance(listed, dict) else listed
    with tarfile.open(folder / entry["filename"].replace("@", "").replace("/", "-")) as archive:
        return {
            package.target: _SOURCE_MAP.sub(b"\n", _member(archive, package.member)),
            package.licence_target: _member(archive, package.licence),
        }


def _member(archive: tarfile.TarFile, path: str) -> bytes:
    file = archive.extractfile(f"package/{path}")
    if file is None:
        raise FileNotFoundError(f"{archive.name!r}: {path} is not a file")
    return file.read()


def main() -> int:
    """Write or compare all files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="report differences, write nothing")
    check = parser.parse_args().check
    files: dict[Path, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        for package in PACKAGES:
            files |= files_of(package, Path(folder))
    differing = [
        path for path, data in files.items() if not path.exists() or path.read_bytes() != data
    ]
    for path in differing:
        print(f"{'differs' if check else 'wrote'}: {path.relative_to(ROOT)}")
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(files[path])
    return 1 if check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
