"""Read on which devices roles and models are to compute: `--device`, and motet.toml."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from motet_shared.errors import ConfigError

CPU, AUTO, CUDA = "cpu", "auto", "cuda"
# Roles whose services compute on a GPU, in the order in which they choose one.
ROLES = ("decode", "prefill", "diffusion", "tts", "asr", "encoder", "embedding", "ranking")
_ONE = re.compile(r"cpu|auto|cuda(:\d{1,3})?(,cuda:\d{1,3})*")


@dataclass(frozen=True, kw_only=True)
class Devices:
    """Hold the wanted devices, each `cpu`, `auto`, `cuda` or a list such as `cuda:0,cuda:1`.

    by_model: devices of models, by `role:model`; they precede `by_role`.
    by_role: devices of roles; they precede `default`. is_given: the user chose `default`.
    """

    default: str = CPU
    is_given: bool = False
    by_role: Mapping[str, str] = field(default_factory=dict)
    by_model: Mapping[str, str] = field(default_factory=dict)

    def wanted(self, role: str, model: str | None) -> str:
        """Return the device of a process; `cpu` for roles that compute on no GPU."""
        if role not in ROLES:
            return CPU
        of_model = self.by_model.get(f"{role}:{model}")
        return of_model or self.by_role.get(role, self.default)

    def names(self, role: str, model: str | None) -> bool:
        """Return True if the user has chosen the device of such a process."""
        return self.is_given or role in self.by_role or f"{role}:{model}" in self.by_model

    @property
    def any_gpu(self) -> bool:
        """Return True unless everything is to compute on the CPU."""
        wanted = {self.default, *self.by_role.values(), *self.by_model.values()}
        return wanted != {CPU}


def parse_devices(
    given: Sequence[str],
    by_role: Mapping[str, str] | None = None,
    by_model: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
) -> Devices:
    """Return the devices of `--device` (`[ROLE=]DEVICE`, repeatable) and of motet.toml.

    by_role: of [roles.NAME]; the command line overrides it. by_model: of [models.NAME], by
    `role:model`. Without a default, that is MOTET_DEVICE, else cpu. Raises ConfigError.
    """
    env = os.environ if env is None else env
    default, roles = env.get("MOTET_DEVICE") or "", dict(by_role or {})
    for role in roles:
        _check_role(f"roles.{role}.device", role)
    for where, device in (
        *((f"roles.{role}.device", one) for role, one in roles.items()),
        *((f"models.{key.partition(':')[2]}.device", one) for key, one in (by_model or {}).items()),
        ("MOTET_DEVICE", default or CPU),
    ):
        check_device(where, device)
    for one in given:
        role, separator, device = one.rpartition("=")
        check_device("--device", device)
        if separator:
            _check_role("--device", role)
            roles[role] = device
        else:
            default = device
    return Devices(
        default=default or CPU, is_given=bool(default), by_role=roles, by_model=by_model or {}
    )


def parse_shares(
    given: Iterable[str], by_role: Mapping[str, float]
) -> tuple[float, dict[str, float]]:
    """Return the share of `--memory-share` for all, and those of roles (`ROLE=SHARE`).

    by_role: of [roles.NAME]; the command line overrides it. Raises ConfigError.
    """
    share, roles = 0.85, dict(by_role)
    for role in roles:
        _check_role(f"roles.{role}.memory_share", role)
    for one in given:
        role, separator, number = str(one).rpartition("=")
        if separator:
            _check_role("--memory-share", role)
            roles[role] = _share("--memory-share", number)
        else:
            share = _share("--memory-share", number)
    return share, roles


def _share(where: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(
            f"{where}: {text!r} is no share; give more than 0, up to 1", param="--memory-share"
        )
    return share


def check_device(where: str, device: str) -> None:
    """Raise ConfigError that names `where` unless `device` names devices."""
    if not _ONE.fullmatch(device):
        raise ConfigError(
            f"{where}: {device!r} is no device; give cpu, cuda (any GPU), auto (a GPU if there is"
            " one), or some of the GPUs, such as cuda:0,cuda:1",
            param=where,
        )


def _check_role(where: str, role: str) -> None:
    if role not in ROLES:
        raise ConfigError(
            f"{where}: {role!r} does not compute on a GPU; the roles that do are {', '.join(ROLES)}",
            param=where,
        )
