"""Read compose.yaml and dump YAML without anchors and merges."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]

Document = dict[str, Any]


def load_compose() -> Document:
    """Return compose.yaml with anchors and merges resolved."""
    found: Document = yaml.safe_load((ROOT / "compose.yaml").read_text())
    return found


def dump(*documents: Document) -> str:
    """Return documents as YAML."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Dump YAML without anchors, so that shared parts are repeated."""

    def ignore_aliases(self, data: Any) -> bool:
        """Return True for every value."""
        return True
