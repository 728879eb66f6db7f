"""What all endpoints share: the bus, the settings, who may ask, how much at a time, and what is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from motet_pipelines.models import check_known
from motet_shared.bus import Bus
from motet_shared.errors import Draining
from motet_shared.telemetry import Metrics

from .auth import Keys
from .config import GatewayConfig
from .limits import Limits
from .metrics import GatewayMetrics

if TYPE_CHECKING:
    from .realtime.session import Session


class Service:
    """One per process."""

    def __init__(self, config: GatewayConfig, bus: Bus, metrics: Metrics):
        self.config = config
        self.bus = bus
        self.keys = Keys(config.api_keys)
        self.limits = Limits(config.max_streams)
        self.metrics = GatewayMetrics(metrics)
        self.metrics.streams.set_function(lambda: self.limits.active)
        self.metrics.sockets.set_function(lambda: len(self.sessions))
        self.sessions: set[Session] = set()

    def admit(self, model: str) -> None:
        """Before any work: Draining while stopping, UnknownModel or Unavailable if nobody can answer for `model`."""
        if self.limits.draining:
            raise Draining("this server is stopping; try again in a moment")
        check_known(self.bus.directory, model)
