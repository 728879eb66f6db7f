"""Print what the image of a service installs: `requirements.py SERVICE` in the folder of pyproject.toml.

Writes common.txt, own.txt and alone.txt, which services/Dockerfile explains. Python alone runs it.
"""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any


def requirements(settings: dict[str, Any], service: str) -> dict[str, list[str]]:
    """Return the lines of each requirements file by its name: common, own and alone.

    Raises KeyError if pyproject.toml has no extra for `service`.
    """
    project, alone = settings["project"], settings["tool"]["motet"]["alone"]
    extras = project["optional-dependencies"]
    everybody = [*project["dependencies"], *extras["telemetry"]]
    common = list(everybody)
    if _torch(extras[service]):
        kin = [set(lines) for lines in extras.values() if _torch(lines)]
        common += sorted(set.intersection(*kin))
    own = [*everybody, *extras[service]]
    return {
        "common": common,
        "own": [line for line in own if _name(line) not in alone],
        "alone": [line for line in own if _name(line) in alone],
    }


def _torch(lines: list[str]) -> bool:
    return "torch" in map(_name, lines)


def _name(line: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", line, maxsplit=1)[0]


if __name__ == "__main__":
    (chosen,) = sys.argv[1:]
    for kind, lines in requirements(
        tomllib.loads(Path("pyproject.toml").read_text()), chosen
    ).items():
        Path(f"{kind}.txt").write_text("".join(f"{line}\n" for line in lines))
