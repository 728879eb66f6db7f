"""Record what engines did in `make extended PART=peers`: tests/extended/results/engines.json."""

from __future__ import annotations

import datetime
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "tests" / "extended" / "results" / "engines.json"


def _extended() -> Any:
    """Return the module of scripts/extended.py, which names processor and commit."""
    spec = importlib.util.spec_from_file_location("extended", ROOT / "scripts" / "extended.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


class EngineRuns:
    """Collect an outcome per feature and engine, and write them at the end.

    A feature that a run did not reach has no entry. `versions`: of each engine's package.
    """

    def __init__(self, path: Path = RESULTS):
        self._path = path
        self._features: dict[str, dict[str, str]] = {}
        self.versions: dict[str, str] = {}

    def note(self, feature: str, engine: str, outcome: str) -> None:
        """Record an outcome, such as `yes`, or `refused` with the name of the field."""
        self._features.setdefault(feature, {})[engine] = outcome

    def write(self) -> None:
        """Write the file; a run without an outcome leaves it as it is."""
        if not self._features:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        extended = _extended()
        document = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "processor": extended.processor(),
            "commit": extended.commit(),
            "versions": self.versions,
            "features": self._features,
        }
        self._path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
