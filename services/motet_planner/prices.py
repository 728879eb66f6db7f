"""Read the price list: what an instance costs per hour, by its hardware; a file in TOML.

    [H100]
    price = 2.99

    [L40S]
    price = 0.99
    cold_start = 45

    [our-box]
    price = 0.40
    prefill_token = 0.00021                # measured: seconds per prefilled token,
    decode_step = [[1, 0.011], [32, 0.03]]   # and per step of so many sequences
    kv_tokens = 60000

Without measured speeds the name is one of `motet plan --gpu`, or "cpu", and the speed is a share of
the hardware's upper bounds.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from motet_shared.errors import ConfigError

_Positive = Annotated[float, Meta(gt=0)]
_Count = Annotated[int, Meta(ge=1)]


class Price(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hold the price and speed of an instance.

    price: per instance and hour, in any currency.
    cold_start: seconds.
    The others: of `Speed`.
    """

    price: Annotated[float, Meta(ge=0)]
    cold_start: Annotated[float, Meta(ge=0)] = 60.0
    prefill_token: _Positive | None = None
    decode_step: list[tuple[_Count, _Positive]] | None = None
    kv_tokens: Annotated[int, Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        if (self.prefill_token is None) != (self.decode_step is None):
            raise ValueError("prefill_token and decode_step go together: give both, or neither")


def read_prices(path: Path) -> dict[str, Price]:
    """Return the prices of a file, by name.

    Raises ConfigError that says where the file is wrong.
    """
    try:
        document = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"--prices: cannot read {str(path)!r}: {error}; give a file such as [H100] price = 2.99"
        ) from None
    if not document:
        raise ConfigError(
            f"--prices: {str(path)!r} has no price; give at least one, such as [H100] price = 2.99"
        )
    try:
        return msgspec.convert(document, dict[str, Price])
    except msgspec.ValidationError as error:
        raise ConfigError(f"--prices: {str(path)!r}: {error}") from None
