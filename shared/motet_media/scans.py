"""Bound the work of decoding a progressive JPEG.

Each of its scans covers all pixels, at a cost of only a few bytes in the file.
"""

from __future__ import annotations

import re

from motet_shared.errors import BadRequest

MAX_SCANS = 100  # encoders write about 10
MAX_SCANNED = 640_000_000  # scans times pixels: a few seconds of work
_MARKER = re.compile(rb"\xff+([^\x00\xd0-\xd7\xff])")  # neither a stuffed byte nor a restart
_SOI, _EOI, _SOS, _TEM = 0xD8, 0xD9, 0xDA, 0x01


def count_scans(data: bytes, most: int) -> int:
    """Return the number of scans of the file's first picture; counting stops at `most` + 1."""
    count, place = 0, 0
    while count <= most and (found := _MARKER.search(data, place)) is not None:
        place = found.end()
        kind = found[1][0]
        if kind == _EOI:
            break
        if kind in (_SOI, _TEM):
            continue
        count += kind == _SOS
        place += int.from_bytes(data[place : place + 2], "big")
    return count


def check_scans(data: bytes, size: tuple[int, int], param: str) -> None:
    """Raise BadRequest for more scans than `MAX_SCANS`, or than the picture's size allows."""
    most = max(1, min(MAX_SCANS, MAX_SCANNED // (size[0] * size[1])))
    if count_scans(data, most) > most:
        message = f"{param}: a JPEG of {size[0]}×{size[1]} pixels in more than {most} scans"
        raise BadRequest(f"{message}; save it with fewer, or not as a progressive one", param=param)
