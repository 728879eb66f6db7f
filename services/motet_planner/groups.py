"""Read the planner's groups: a TOML file with a table per group of equal instances.

[decode]
min = 0
max = 8
target = 16

[large]
role = "decode"
model = "llama-70b"
deployment = "decode-large"
max = 4
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec

from motet_planner.policy import RolePolicy
from motet_shared.errors import ConfigError

HOLDING_ROLES = ("decode",)  # roles whose callers wait while no instance is ready
_NAMES = ("role", "model", "deployment")
_POLICY = tuple(field.name for field in fields(RolePolicy))


@dataclass(frozen=True, kw_only=True)
class Group:
    """Describe equal instances of one role, and of one model if it is named.

    deployment: what the actuator calls them.
    """

    name: str
    role: str
    model: str
    deployment: str
    policy: RolePolicy


def read_groups(path: Path) -> dict[str, Group]:
    """Return the groups of a file, by name.

    Raises ConfigError that names the table, the field, the value and a remedy.
    """
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"roles: cannot read {str(path)!r}: {error}; give a file with [decode]", param="roles"
        ) from None
    groups = {
        name: _group(f"{str(path)!r}: [{name}]", name, table) for name, table in document.items()
    }
    if not groups:
        raise ConfigError(
            f"roles: {str(path)!r} has no table; give at least one, such as [decode]", param="roles"
        )
    _check_apart(path, groups)
    return groups


def check_local(groups: Mapping[str, Group]) -> None:
    """Raise ConfigError for what `motet scale` cannot do: scale a role to 0, or one model alone."""
    for group in groups.values():
        if group.policy.min == 0:
            raise ConfigError(
                f"roles: [{group.name}] min=0: a `motet up` keeps one of each role; give at least 1",
                param="roles",
            )
        if group.model:
            raise ConfigError(
                f"roles: [{group.name}] model={group.model!r}: a `motet up` has as many of each model; leave it out",
                param="roles",
            )


def _group(where: str, name: str, table: Any) -> Group:
    if not isinstance(table, Mapping):
        raise ConfigError(f"roles: {where} is no table; write its settings below it", param="roles")
    if unknown := sorted(set(table) - {*_NAMES, *_POLICY}):
        known = ", ".join([*_NAMES, *_POLICY])
        raise ConfigError(
            f"roles: {where} {unknown[0]} is no setting; there are {known}", param="roles"
        )
    try:
        named = msgspec.convert({key: table[key] for key in _NAMES if key in table}, dict[str, str])
        policy = msgspec.convert({key: table[key] for key in _POLICY if key in table}, RolePolicy)
    except msgspec.ValidationError as error:
        raise ConfigError(f"roles: {where} {error}", param="roles") from None
    except ConfigError as error:
        raise ConfigError(f"roles: {where} {error.message}", param="roles") from None
    role = named.get("role", name)
    if policy.min == 0 and role not in HOLDING_ROLES:
        raise ConfigError(
            f"roles: {where} min=0: requests are not held while no {role} instance runs, only for"
            f" {', '.join(HOLDING_ROLES)}; give at least 1",
            param="roles",
        )
    return Group(
        name=name,
        role=role,
        model=named.get("model", ""),
        deployment=named.get("deployment", name),
        policy=policy,
    )


def _check_apart(path: Path, groups: Mapping[str, Group]) -> None:
    """Raise ConfigError unless every instance belongs to at most one group."""
    seen: dict[tuple[str, str], str] = {}
    for group in groups.values():
        for other in (
            [(group.role, group.model), (group.role, "")] if group.model else [(group.role, "")]
        ):
            if other in seen:
                raise ConfigError(
                    f"roles: {str(path)!r}: [{group.name}] and [{seen[other]}] are both of role {group.role!r}; give"
                    " each a model of its own",
                    param="roles",
                )
        if not group.model and any(role == group.role for role, _ in seen):
            raise ConfigError(
                f"roles: {str(path)!r}: [{group.name}] has all of role {group.role!r}, but there is another; give it a"
                " model",
                param="roles",
            )
        seen[group.role, group.model] = group.name
