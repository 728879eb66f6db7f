"""Read compose.yaml, and write YAML in which everything is written out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from motet_shared.errors import ConfigError

Document = dict[str, Any]
_VARIABLE = re.compile(r"\$\{(\w+):-([^${}]*)\}")


def compose_file() -> Path:
    """Return compose.yaml, of the source tree or as installed. Raises ConfigError without it."""
    here = Path(__file__).resolve()
    for path in (here.parents[3] / "compose.yaml", here.parents[1] / "compose.yaml"):
        if path.is_file():
            return path
    raise ConfigError(
        "compose.yaml was not found beside this installation; install the whole wheel"
    )


def load_compose() -> Document:
    """Return compose.yaml without anchors and merges."""
    found: Document = yaml.safe_load(compose_file().read_text())
    return found


def variables() -> dict[str, str]:
    """Return the variables of compose.yaml with their defaults."""
    text = compose_file().read_text()
    found: dict[str, str] = {}
    while matches := _VARIABLE.findall(text):
        found |= dict(matches)
        text = _VARIABLE.sub(r"\2", text)
    return found


def substitute(text: str, given: Mapping[str, str]) -> str:
    """Return a text of compose.yaml with the given values of variables, or else their defaults."""
    while (replaced := _VARIABLE.sub(lambda one: given.get(one[1], one[2]), text)) != text:
        text = replaced
    return text


def dump(*documents: Document) -> str:
    """Return YAML documents without anchors: what services share is written out in each."""
    return yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True
