"""Run JavaScript in tests, with the packages of examples/javascript.

Node.js is the machine's or else Playwright's. The packages come from npm if
scripts/ensure_node_modules could install them; otherwise small substitutes of the same names are
used.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

from playwright._impl._driver import compute_driver_executable

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "javascript"
SUBSTITUTES = {"@nats-io/transport-node": "nats.mjs", "@msgpack/msgpack": "msgpack.mjs"}
OLDEST = 18


def node() -> str:
    """Return the path of a Node.js that is recent enough."""
    found = shutil.which("node")
    if found is not None:
        version = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=30)
        number = re.match(r"v(\d+)\.", version.stdout)
        if number is not None and int(number[1]) >= OLDEST:
            return found
    return str(compute_driver_executable()[0])


def package_sources() -> list[str]:
    """Return where packages come from here: "substitutes", and "npm" if they were installed."""
    wanted = json.loads((EXAMPLE / "package.json").read_text())["dependencies"]
    manifests = [EXAMPLE / "node_modules" / name / "package.json" for name in wanted]
    installed = all(manifest.is_file() for manifest in manifests) and wanted == {
        name: json.loads(manifest.read_text())["version"]
        for name, manifest in zip(wanted, manifests, strict=True)
    }
    return ["substitutes", *(["npm"] if installed else [])]


def copy_example(folder: Path, source: str) -> Path:
    """Copy examples/javascript below `folder` with packages of `source`; return its folder."""
    copy = folder / "javascript"
    if source == "npm":
        shutil.copytree(EXAMPLE, copy)
        return copy
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("node_modules"))
    for name, module in SUBSTITUTES.items():
        package = copy / "node_modules" / name
        package.mkdir(parents=True)
        shutil.copyfile(Path(__file__).parents[1] / "javascript" / module, package / "index.mjs")
        manifest = {"name": name, "type": "module", "exports": "./index.mjs"}
        (package / "package.json").write_text(json.dumps(manifest))
    return copy
