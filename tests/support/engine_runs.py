"""Record what engines did in `make extended PART=peers`: tests/extended/results/engines.json."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "extended" / "results" / "engines.json"


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
        document = {
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "versions": self.versions,
            "features": self._features,
        }
        self._path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
