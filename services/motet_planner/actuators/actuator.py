"""Define the interface of actuators.

No actuator waits until an instance is ready: heartbeats report that.
"""

from __future__ import annotations

import logging
from typing import Protocol

from motet_shared.errors import MotetError

log = logging.getLogger(__name__)


class ActuatorError(MotetError):
    """Report an action that failed for now.

    The planner logs it and retries after the next observation.
    """

    code = "unavailable"
    retryable = True


class Actuator(Protocol):
    """Scale groups; `name` is the platform's for a group: a deployment, a compose service."""

    async def count(self, name: str) -> int | None:
        """Return how many instances are requested now; None: the platform does not report it."""
        ...

    async def scale(self, name: str, count: int) -> None:
        """Request `count` instances, possibly as many as exist.

        Removed ones finish their work first.
        """
        ...

    async def close(self) -> None: ...


class DryRun:
    """Change nothing: decisions are logged, counted in metrics, and sent by operation `list_targets`."""

    async def count(self, name: str) -> int | None:
        return None

    async def scale(self, name: str, count: int) -> None:
        log.info("dry run: %s would be scaled to %d", name, count)

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""
