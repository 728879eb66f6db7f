"""What every actuator can do. None of them waits until an instance is ready: that is what heartbeats tell."""

from __future__ import annotations

import logging
from typing import Protocol

from motet_shared.errors import MotetError

log = logging.getLogger(__name__)


class ActuatorError(MotetError):
    """It could not be done now. The planner tells, goes on, and tries again at its next look."""

    code = "unavailable"
    retryable = True


class Actuator(Protocol):
    """`name`: what the place calls a group of equal instances: a deployment, a service of a compose file."""

    async def count(self, name: str) -> int | None:
        """How many are asked for now; None: this place does not tell."""
        ...

    async def scale(self, name: str, count: int) -> None:
        """Have so many, which may be as many as there are. Those that go finish their work first."""
        ...

    async def close(self) -> None: ...


class DryRun:
    """Changes nothing: the decisions are in the log, in the metrics, and told by the operation `targets`."""

    async def count(self, name: str) -> int | None:
        return None

    async def scale(self, name: str, count: int) -> None:
        log.info("dry run: %s would be scaled to %d", name, count)

    async def close(self) -> None:
        """Nothing is open."""
