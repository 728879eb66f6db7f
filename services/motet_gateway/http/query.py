"""Decode the query of a request as a struct, and choose a page of a list by its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec

from motet_shared.errors import BadRequest

from .decoding import explain
from .exchange import Exchange
from .fields import Strict

Query = TypeVar("Query", bound=Strict)


def query_of(http: Exchange, cls: type[Query], lists: Sequence[str] = ()) -> Query:
    """Return the query of a request. Raises BadRequest, which names the parameter.

    The parameters in `lists` may be repeated; OpenAI's clients write `name[]`.
    """
    given = parse_qs(http.scope["query_string"].decode("latin-1"), keep_blank_values=True)
    fields: dict[str, Any] = {}
    for name, values in given.items():
        if (plain := name.removesuffix("[]")) in lists:
            fields.setdefault(plain, []).extend(values)
        else:
            fields[name] = values[-1]
    try:
        return msgspec.convert(fields, cls, strict=False)
    except msgspec.ValidationError as error:
        raise explain(str(error), msgspec.json.encode(fields)) from None


def page_of(ids: list[str], after: str | None, *, newest_first: bool) -> list[str]:
    """Return the ids behind `after`, in the order of a list; `ids` has the oldest first.

    Raises BadRequest if `after` is none of them.
    """
    ordered = ids[::-1] if newest_first else ids
    if after is None:
        return ordered
    if after not in ordered:
        raise BadRequest(f"`after`: there is no {after[:80]!r}; leave it out", param="after")
    return ordered[ordered.index(after) + 1 :]
