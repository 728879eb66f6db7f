"""Read recorded traffic: request times and lengths, without texts.

One JSON object per line, in the formats of `motet_shared.recorded_traffic`, which `motet bench`
reads too. Or the tables of Azure's public traces: `TIMESTAMP,ContextTokens,GeneratedTokens`, with
dates.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from motet_planner.traffic import Arrival
from motet_shared.errors import ConfigError
from motet_shared.recorded_traffic import MOONCAKE_FORM, MOTET_FORM, MooncakeLine, decode_line

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_FORMS = f"{MOTET_FORM}, {MOONCAKE_FORM}, or a table {','.join(_AZURE)}"


def read_trace(path: Path) -> list[Arrival]:
    """Return the requests in order of arrival, the first one at 0 s.

    Raises ConfigError that names the line that cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--traffic: cannot read {str(path)!r}: {error}; give a file of requests"
        ) from None
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    parse: Callable[[str], Arrival] = _object
    if lines and lines[0][1].startswith(_AZURE[0]):
        parse = _row_parser(path, lines.pop(0)[1])
    if not lines:
        raise ConfigError(f"--traffic: {str(path)!r} has no request; give one per line")
    found = [_checked(path, number, line, parse) for number, line in lines]
    first = min(found).at
    return sorted(request._replace(at=request.at - first) for request in found)


def _checked(path: Path, number: int, line: str, parse: Callable[[str], Arrival]) -> Arrival:
    try:
        request = parse(line)
        if not 0 <= request.at < math.inf or request.prompt < 1 or request.output < 1:
            raise ValueError("times must be at least 0, lengths at least 1")
    except ValueError as error:
        raise ConfigError(
            f"--traffic: line {number} of {str(path)!r}: {error}; give {_FORMS}"
        ) from None
    return request


def _object(line: str) -> Arrival:
    entry = decode_line(line.encode())
    if isinstance(entry, MooncakeLine):
        return Arrival(entry.timestamp / 1000, entry.input_length, entry.output_length)
    if entry.tokens is None:
        raise ValueError('"tokens" is missing; give the length of the prompt')
    return Arrival(entry.arrival, entry.tokens + (entry.prefix_tokens or 0), entry.max_tokens)


def _row_parser(path: Path, header: str) -> Callable[[str], Arrival]:
    columns = next(csv.reader([header]))
    if missing := [name for name in _AZURE if name not in columns]:
        raise ConfigError(f"--traffic: {str(path)!r} has no column {missing[0]}; give {_FORMS}")
    places = [columns.index(name) for name in _AZURE]

    def parse(line: str) -> Arrival:
        row = next(csv.reader([line]))
        if len(row) < len(columns):
            raise ValueError(f"{len(row)} columns instead of {len(columns)}")
        when, prompt, output = (row[place] for place in places)
        at = datetime.fromisoformat(when)
        moment = at if at.tzinfo else at.replace(tzinfo=UTC)
        # Some rows have no reply; an engine generates at least one token.
        return Arrival(moment.timestamp(), int(prompt), max(1, int(output)))

    return parse
