"""Run an engine's host in another Python environment: `PYTHON other_environment.py --engine …`.

`PYTHON other_environment.py motet_media.child …` runs one of the host's decoding children there.

`MOTET_ENGINE_PACKAGES` names the folders of Motet's packages, which are imported from there; all else
comes from the environment itself, so that dependencies do not mix. It needs the wire's dependencies
only: those that Motet's package has without extras.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

VARIABLE = "MOTET_ENGINE_PACKAGES"
CHILD = "motet_media.child"


class Finder:
    """Find Motet's packages in their folders, without a folder of others in `sys.path`."""

    def __init__(self, folders: Sequence[str]):
        self._folders = {os.path.basename(folder): folder for folder in folders}

    def find_spec(
        self, name: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        folder = self._folders.get(name)
        if folder is None:
            return None
        return importlib.util.spec_from_file_location(
            name, os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
        )


def install() -> None:
    """Make the packages importable, and this script's folder not: it has names of libraries."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != here]
    sys.meta_path.append(Finder(os.environ[VARIABLE].split(os.pathsep)))


install()

if __name__ == "__mp_main__":  # a process that vLLM has spawned
    from motet_shared.process.actor import die_with_parent

    die_with_parent()

if __name__ == "__main__" and sys.argv[1:2] == [CHILD]:
    from motet_media.child import main

    main(sys.argv[2:])
elif __name__ == "__main__":
    from motet_shared.process.starts import importing

    with importing():
        from motet_engines.config import EnginesConfig
        from motet_engines.service import EngineHost
        from motet_media.worker import ENTRY
        from motet_shared.process.actor import run

    os.environ[ENTRY] = os.path.abspath(__file__)  # starts decoding children, as above
    run(EngineHost, EnginesConfig)
