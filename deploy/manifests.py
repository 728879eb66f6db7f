"""What is made of compose.yaml is YAML in which everything is written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]

Document = dict[str, Any]


def composed() -> Document:
    """compose.yaml, without anchors and merges."""
    found: Document = yaml.safe_load((ROOT / "compose.yaml").read_text())
    return found


def dump(*documents: Document) -> str:
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Without anchors: what services share is written out in each."""

    def ignore_aliases(self, data: Any) -> bool:
        return True
