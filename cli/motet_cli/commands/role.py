"""Change the role of a running engine, decode or prefill: `motet role`."""

from __future__ import annotations

import asyncio
from argparse import Namespace

from motet_cli.supervision import connection
from motet_cli.supervision.connection import NatsAccess
from motet_cli.supervision.stack_bus import stack_bus
from motet_shared.errors import ConfigError
from motet_shared.messages import SwitchRole
from motet_shared.wire import subjects

_ROLES = ("decode", "prefill")
_TIMEOUT = 10.0  # seconds


def run(args: Namespace) -> int:
    asyncio.run(change(connection.find(args.url, args.nats), args.instance, args.role))
    print(f"{args.instance}: drains, then restarts with role {args.role}")
    return 0


async def change(access: NatsAccess, instance: str, role: str) -> None:
    """Change the role of an instance.

    Raises ConfigError for an id of another role, or the worker's own error.
    """
    try:
        current = subjects.role_of(instance)
    except ValueError:
        current = ""
    if current not in _ROLES:
        raise ConfigError(
            f"INSTANCE: {instance!r} is not an LLM engine; give an id of role decode or prefill, as `motet top` shows",
            param="INSTANCE",
        )
    async with stack_bus(access) as bus:
        try:
            await bus.directory.wait_for(lambda directory: directory.instances(current), _TIMEOUT)
        except TimeoutError:
            raise ConfigError(
                f"INSTANCE: no instance of role {current} runs; start one, or give another id",
                param="INSTANCE",
            ) from None
        async with bus.open(
            current, SwitchRole(role=role), instance=instance, deadline=_TIMEOUT
        ) as stream:
            async for _ in stream:
                pass
