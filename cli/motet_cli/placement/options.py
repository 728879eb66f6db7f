"""Join what the command line and motet.toml say about GPUs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from motet_cli.placement.devices import Devices, parse_devices, parse_shares
from motet_cli.stack_file.models import DeclaredModel, device_of
from motet_cli.stack_file.schema import StackFile


@dataclass(frozen=True, kw_only=True)
class PlacementOptions:
    """Hold the wanted devices, the share of their free memory, and the shares of roles."""

    devices: Devices
    share: float
    shares: dict[str, float]


def placement_options(
    args: Namespace, file: StackFile, declared: Sequence[DeclaredModel]
) -> PlacementOptions:
    """Return the options of `--device` and `--memory-share`. Raises ConfigError."""
    by_role = {role: device for role, table in file.roles.items() if (device := device_of(table))}
    by_model = {f"{one.role}:{one.name}": one.device for one in declared if one.device}
    shares = {
        role: table.memory_share
        for role, table in file.roles.items()
        if table.memory_share is not None
    }
    share, of_roles = parse_shares(args.memory_share, shares)
    return PlacementOptions(
        devices=parse_devices(args.device, by_role, by_model), share=share, shares=of_roles
    )
