"""Make room for connections within the process's limit of open files."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

_OTHERS = 256  # descriptors for everything except client connections


def room_for(connections: int) -> int:
    """Raise the soft limit of open files as needed; return how many connections fit, at least 1."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHERS
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    reached = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if reached > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (reached, hard))
    room = max(min(connections, max(reached, soft) - _OTHERS), 1)
    if room < connections:
        log.warning(
            "open files are limited to %d: at most %d connections (ulimit -n)",
            max(reached, soft),
            room,
        )
    return room
