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
        """Write the file, beside what it has of the same commit; a run without outcomes leaves it."""
        if not self._features:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        extended = _extended()
        features, versions = self._with_earlier(extended.commit())
        document = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "processor": extended.processor(),
            "commit": extended.commit(),
            "versions": versions,
            "features": features,
        }
        self._path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")

    def _with_earlier(self, commit: str) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
        """Return features and versions, with those that the file has of this commit."""
        earlier: dict[str, Any] = json.loads(self._path.read_text()) if self._path.exists() else {}
        if earlier.get("commit") != commit:
            return self._features, self.versions
        features: dict[str, dict[str, str]] = earlier["features"]
        for feature, outcomes in self._features.items():
            features[feature] = features.get(feature, {}) | outcomes
        return features, earlier["versions"] | self.versions
