"""Define the settings of the planner process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from motet_shared.process.config import Duration, ProcessConfig, setting

DEFAULT_ROLES = Path(__file__).with_name("roles.toml")


@dataclass(frozen=True, kw_only=True)
class PlannerConfig(ProcessConfig):
    """Scale each role to the number of instances that its load needs."""

    roles: Path = setting(
        "TOML file of the groups to scale: a table per role (default: decode, tokenizer)",
        default=DEFAULT_ROLES,
    )
    actuator: Literal["dry-run", "local", "compose", "kubernetes"] = setting(
        "what starts and stops instances; dry-run only logs the decisions", default="dry-run"
    )
    interval: Duration = setting("time between two observations", default=2.0, min=0.2)
    insist: Duration = setting(
        "time after which an unchanged target is sent to the actuator again", default=60.0, min=1
    )
    compose: str = setting("the command of compose, with its options", default="docker compose")
    url: str = setting(
        "of actuator local: the server of a `motet up` here", default="http://127.0.0.1:8000"
    )
