"""Read records of tenants: documents in JSON that state the version of their schema."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec import Struct

from motet_gateway.http.problems import NotFound
from motet_shared.errors import Unavailable

from .documents import Documents

Record = TypeVar("Record")


class _Version(Struct):
    version: int = 1  # what is left out of a record has its default


_version = msgspec.json.Decoder(_Version).decode


def missing(what: str) -> NotFound:
    """Return the error for a record that a tenant does not have; `what` names it."""
    return NotFound(f"{what} does not exist; it may have expired")


async def read_record(
    documents: Documents,
    owner: str,
    name: str,
    decode: Callable[[bytes], Record],
    *,
    what: str,
    schema: int,
) -> Record:
    """Return a record of a tenant; `what` names it in errors.

    Raises NotFound if there is none, and Unavailable if its version is above `schema`, or if the
    store does not answer. The version is read first: a newer record may not be decodable.
    """
    try:
        data = await documents.get(owner, name)
    except NotFound:
        raise missing(what) from None
    if (version := _version(data).version) > schema:
        newer = f"{what} was stored by a newer version of the server"
        raise Unavailable(f"{newer} ({version}, this one reads {schema})")
    return decode(data)
