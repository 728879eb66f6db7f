"""Limit work to sites: the names of groups of instances that fail together, such as a data centre.

    with sites.only(("eu-1", "eu-2")):       # what the gateway does for a tenant's request
        async with Failover(...) as instance:  # an instance of eu-1 or eu-2
            bus.open("tokenizer", request, instance=instance)

The limit belongs to the running task and the tasks that it creates. An open carries it to the
called instance, whose handler runs under it in turn, so that it holds for every stage of a request.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from motet_shared.errors import NoAllowedSite

PATTERN = "^[a-z0-9][a-z0-9-]{0,31}$"
is_name = re.compile(PATTERN).fullmatch

_allowed: ContextVar[tuple[str, ...]] = ContextVar("allowed_sites", default=())
allowed = _allowed.get  # sites at which the running task may have work done; empty: everywhere


@contextmanager
def only(names: Sequence[str]) -> Iterator[None]:
    """Limit what is called within the block to instances of these sites; none: no limit."""
    token = _allowed.set(tuple(names))
    try:
        yield
    finally:
        _allowed.reset(token)


def permits(site: str) -> bool:
    """Return True if the running task may have work done at an instance of `site`."""
    names = _allowed.get()
    return not names or site in names


def refusal(what: str) -> NoAllowedSite:
    """Return the error for work that no allowed site does; `what`: a role, perhaps with a model."""
    names = ", ".join(_allowed.get())
    return NoAllowedSite(
        f"sites: no {what} is ready at {names}, the sites allowed for this key; start one there with "
        "`--site`, or allow a further site in the tenants file",
        param="sites",
    )
