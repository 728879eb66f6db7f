"""Parse names of models on a hub: `org/name`, `org/name@revision`, `org/name:FILE.gguf`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from motet_shared.errors import ConfigError

_PART = r"[A-Za-z0-9](?:[\w.-]*[A-Za-z0-9_])?"
_REFERENCE = re.compile(
    rf"(?P<repository>{_PART}/{_PART})"
    r"(?:@(?P<revision>[\w][\w./-]*))?"
    r"(?::(?P<file>[\w][\w./+-]*\.gguf))?"
)


@dataclass(frozen=True, kw_only=True)
class HubReference:
    """Name a repository of a hub, a revision of it and, for GGUF, one file in it."""

    repository: str  # "org/name"
    revision: str | None = None  # branch, tag or commit; None: the default branch
    file: str | None = None  # path in the repository

    @property
    def name(self) -> str:
        """Return the name that the model is served under: the reference without revision."""
        return f"{self.repository}:{self.file}" if self.file else self.repository

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{self.repository}{revision}" + (f":{self.file}" if self.file else "")


def parse_reference(text: str) -> HubReference | None:
    """Parse a reference; return None for a text of another form, such as a path."""
    match = _REFERENCE.fullmatch(text)
    if match is None or ".." in text or "//" in text:
        return None
    return HubReference(**match.groupdict())


def require_reference(text: str) -> HubReference:
    """Parse a reference. Raises ConfigError for a text of another form."""
    if (reference := parse_reference(text)) is None:
        raise ConfigError(
            f"MODEL: {text!r} is not a name on a hub; give org/name, as the hub shows it",
            param="MODEL",
        )
    return reference
