"""Change the role of a running engine, decode or prefill: `motet role`."""

from __future__ import annotations

import asyncio
from argparse import Namespace

from motet_cli.supervision import connection
from motet_cli.supervision.connection import Connection
from motet_cli.supervision.stack_bus import stack_bus
from motet_shared.errors import ConfigError
from motet_shared.messages import SwitchRole
from motet_shared.wire import subjects

_ROLES = ("decode", "prefill")
_PATIENCE = 10.0  # seconds


def run(args: Namespace) -> int:
    asyncio.run(change(connection.find(args.url, args.nats), args.instance, args.role))
    print(
        f"{args.instance}: takes no new work, and is of role {args.role} when what runs there is complete"
    )
    return 0


async def change(found: Connection, instance: str, role: str) -> None:
    """Change the role of an instance.

    Raises ConfigError for an unknown id, otherwise the worker's own error.
    """
    try:
        serves = subjects.role_of(instance)
    except ValueError:
        serves = ""
    if serves not in _ROLES:
        raise ConfigError(
            f"INSTANCE: {instance!r} is no engine; `motet top` shows the ids that begin with decode or prefill"
        )
    async with stack_bus(found) as bus:
        try:
            await bus.directory.wait_for(lambda directory: directory.instances(serves), _PATIENCE)
        except TimeoutError:
            raise ConfigError(f"INSTANCE: nobody of role {serves} is there") from None
        async with bus.open(
            serves, SwitchRole(role=role), instance=instance, deadline=_PATIENCE
        ) as stream:
            async for _ in stream:
                pass
