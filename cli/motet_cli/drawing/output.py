"""Write what was made to the file that `--output` names."""

from __future__ import annotations

from pathlib import Path

from motet_shared.errors import ConfigError


def write(given: str, data: bytes) -> None:
    """Write the file and print its path. Raises ConfigError if it cannot be written."""
    output = Path(given)
    try:
        output.write_bytes(data)
    except OSError as error:
        message = f"--output: cannot write {given!r}: {error.strerror}; give a file in a folder"
        raise ConfigError(message, param="--output") from None
    print(output)
