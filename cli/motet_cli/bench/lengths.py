"""Parse distributions of token counts given on the command line."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from motet_shared.errors import ConfigError

LONGEST = 10_000_000  # tokens
_FORMS = "N, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA"


@dataclass(frozen=True)
class Lengths:
    """Represent a distribution: `draw(rng)` returns an integer of at least 1.

    text: the distribution as it was given.
    """

    text: str
    draw: Callable[[Random], int]


def parse(option: str, text: str) -> Lengths:
    """Parse `128`, `uniform:64,256` (both included) or `lognormal:200,0.5`.

    The numbers of `lognormal` are the median, and sigma of the logarithm. Raises ConfigError that
        names the option, the text and the valid forms.
    """
    name, colon, rest = text.strip().partition(":")
    try:
        numbers = [float(part) for part in (rest if colon else name).split(",")]
        return Lengths(text.strip(), _FAMILIES[name if colon else "fixed"](*numbers))
    except (KeyError, TypeError, ValueError) as error:
        why = f" ({error})" if type(error) is _OutOfRange else ""
        raise ConfigError(
            f"{option}: {text!r} is not a distribution of lengths{why}; give {_FORMS}", param=option
        ) from None


class _OutOfRange(ValueError):
    """Report a parameter of a distribution outside its range."""


def _whole(name: str, value: float) -> int:
    if not 1 <= value <= LONGEST or value != int(value):
        raise _OutOfRange(f"{name} must be a whole number from 1 to {LONGEST}")
    return int(value)


def _fixed(value: float) -> Callable[[Random], int]:
    length = _whole("N", value)
    return lambda rng: length


def _uniform(low: float, high: float) -> Callable[[Random], int]:
    least, most = _whole("LOW", low), _whole("HIGH", high)
    if most < least:
        raise _OutOfRange("HIGH must not be below LOW")
    return lambda rng: rng.randint(least, most)


def _lognormal(median: float, sigma: float) -> Callable[[Random], int]:
    mu = math.log(_whole("MEDIAN", median))
    if not 0 <= sigma <= 5:
        raise _OutOfRange("SIGMA must be from 0 to 5")
    return lambda rng: min(LONGEST, max(1, round(rng.lognormvariate(mu, sigma))))


_FAMILIES: dict[str, Callable[..., Callable[[Random], int]]] = {
    "fixed": _fixed,
    "uniform": _uniform,
    "lognormal": _lognormal,
}
