"""Change a worker's role: it drains as if it stopped, and its process starts again."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from motet_shared.errors import BadRequest, Unavailable
from motet_shared.messages import SwitchRole
from motet_shared.wire.discovery import Directory

ROLES = ("decode", "prefill")
_NOT_TAKEN_OVER = ("--role", "--instance")  # an instance's id begins with its role


def check(request: SwitchRole, role: str, directory: Directory, instance: str, model: str) -> None:
    """Raise BadRequest for an unknown role, Unavailable for the only decode worker of the model."""
    if request.role not in ROLES:
        raise BadRequest(f"role: {request.role!r} is none of {', '.join(ROLES)}", param="role")
    others = [beat for beat in directory.ready("decode", model=model) if beat.instance != instance]
    if role == "decode" and request.role != role and not others:
        raise Unavailable(
            f"{instance} is the only decode worker of {model!r}; start another one first"
        )


def command_line(role: str, arguments: Sequence[str]) -> list[str]:
    """Return the command line of a worker of `role`, with the other `arguments` unchanged."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and argument.partition("=")[0] not in _NOT_TAKEN_OVER:
            kept.append(argument)
        skip = argument in _NOT_TAKEN_OVER
    return [sys.executable, "-m", "motet_llm", *kept, "--role", role]
