"""Record what came out of a suite, one JSON file each, for docs/conformance.md."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from extended import commit, processor

RESULTS = Path(__file__).parents[1] / "extended" / "results" / "conformance"


def record(
    name: str,
    title: str,
    version: str,
    cases: Mapping[str, str],
    misses: Mapping[str, str],
    results: Path = RESULTS,
) -> list[str]:
    """Write the result of a suite; return what is not as `misses` says, empty if all is.

    cases: the error of each case, "" if it passed. misses: the reason of each case that fails.
    """
    failed = {case: error for case, error in cases.items() if error}
    document: dict[str, Any] = {
        "suite": title,
        "version": version,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": processor(),
        "commit": commit(),
        "applicable": len(cases),
        "passed": len(cases) - len(failed),
        "cases": sorted(cases),
        "misses": {case: misses.get(case, error) for case, error in failed.items()},
    }
    results.mkdir(parents=True, exist_ok=True)
    text = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    (results / f"{name}.json").write_text(text, encoding="utf-8")
    wrong = [f"{case}: {error}" for case, error in failed.items() if case not in misses]
    wrong += [f"{case} passed, or is gone" for case in misses if case not in failed]
    return wrong
