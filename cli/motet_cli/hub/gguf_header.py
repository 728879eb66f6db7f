"""Fetch the header of a GGUF file on a hub, without its tensors.

The beginning of the file is requested as an HTTP range, more of it until the header is complete. A
hub that does not support ranges is read up to there, and the connection closed.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import httpx2
import huggingface_hub as hub
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from motet_models.checkpoints import derived
from motet_models.gguf_tensors import Incomplete, parse_tensors, parts_of
from motet_shared.errors import ConfigError

from .download import explained, find_cached
from .reference import HubReference
from .retry import retried

_FIRST, _MOST = 4 << 20, 256 << 20  # bytes that are asked for at first, and at most
_CHUNK = 1 << 20


def fetch_header(reference: HubReference) -> Path:
    """Return a sparse file with the header and the size of the hub's, or the cached file.

    It is kept under MOTET_CACHE, by repository, revision and name; of a split file all parts are.
    Raises ConfigError if a part cannot be read, or is no GGUF file.
    """
    cached = find_cached(reference)
    if cached is not None:
        return cached
    place = derived.cache_root() / "headers" / reference.repository.replace("/", "--")
    folder = place / (reference.revision or "main")
    names = [str(part) for part in parts_of(Path(reference.file or ""))]
    with explained(reference):
        for name in names:
            _write(folder / name, *_fetch(reference, name))
    return folder / names[0]


def _fetch(reference: HubReference, name: str) -> tuple[bytes, int]:
    """Return the bytes that hold the header, and the size of the file."""
    data, size, wanted = b"", 0, _FIRST
    while wanted <= _MOST:
        more, size = retried(partial(_range, reference, name, len(data), wanted))
        data += more
        try:
            parse_tensors(data)
        except Incomplete:
            if len(data) >= size:
                raise ConfigError(f"{reference}: {name} is cut off; report it") from None
            wanted *= 2
        except ValueError as error:
            raise ConfigError(f"{reference}: {name} cannot be read: {error}") from error
        else:
            return data, size
    raise ConfigError(f"{reference}: the header of {name} takes more than {_MOST} bytes")


def _range(reference: HubReference, name: str, start: int, stop: int) -> tuple[bytes, int]:
    """Return the bytes of a file from `start` to before `stop`, or its end, and its size."""
    url = hub.hf_hub_url(reference.repository, name, revision=reference.revision)
    headers = {**build_hf_headers(), "Range": f"bytes={start}-{stop - 1}"}
    try:
        with get_session().stream("GET", url, headers=headers, follow_redirects=True) as answer:
            hf_raise_for_status(answer)
            is_range = answer.status_code == 206
            total = answer.headers.get("Content-Range", "").rpartition("/")[2]
            size = int(total if is_range else answer.headers["Content-Length"])
            skipped, found = (0 if is_range else start), bytearray()
            for chunk in answer.iter_bytes(_CHUNK):
                found += chunk
                if len(found) >= skipped + stop - start:
                    break
    except (httpx2.TransportError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{reference}: the hub cannot be reached, or does not tell the size of {name}"
            f" ({error!r}); try again, or download the file"
        ) from error
    return bytes(found[skipped : skipped + stop - start]), size


def _write(path: Path, data: bytes, size: int) -> None:
    """Write a file of `size` bytes, of which only the first take space on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.write(data)
        file.truncate(size)
    partial.replace(path)
