"""A tenant at work: what it may do, what it has used, and what its calls hold while they run."""

from __future__ import annotations

import time
from typing import Any, NoReturn

from motet_shared.errors import BadRequest
from motet_shared.tenants import DEFAULT, TenantLimits

from .asgi import Headers
from .buckets import NANOSECONDS, Allowance, Bucket, Clock, Hold
from .limits import Limits, Slot
from .metrics import GatewayMetrics
from .problems import RateLimited
from .rights import Rights

SECOND = 1_000_000  # units of sound: microseconds
_MINUTE, _HOUR = 60, 3600
_AT_ONCE = 20  # refusals that are told at once, and per second after that
_LATEST = 2 * NANOSECONDS  # that a refusal is kept back


class Ticket:
    """What one call holds: places, and amounts of what is limited. Leave its block and what was not used comes back."""

    __slots__ = ("_count", "_slot", "_tenant", "audio", "images", "tokens")

    def __init__(self, tenant: Tenant, slot: Slot, count: int, tokens: Hold, images: Hold, audio: Hold):
        self._tenant, self._slot, self._count = tenant, slot, count
        self.tokens, self.images, self.audio = tokens, images, audio

    def release(self) -> None:
        """A second call does nothing."""
        self._slot.release()
        self._tenant.streams -= self._count
        self._count = 0
        self.settle()

    def settle(self) -> None:
        """Nothing more will be used: what is left comes back, and the places stay."""
        for hold in (self.tokens, self.images, self.audio):
            hold.settle()

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Tenant:
    """One tenant, from the first time that it was in the file. `name`: "" where nobody needs a key."""

    def __init__(
        self,
        name: str,
        limits: TenantLimits,
        gate: Limits,
        metrics: GatewayMetrics,
        clock: Clock = time.monotonic_ns,
    ):
        self.rights = Rights(name, limits)
        self.streams = self.sockets = 0  # that are open
        self._gate, self._metrics, self._clock = gate, metrics, clock
        self._refusals = Bucket(_AT_ONCE, 1, clock)
        self._label = name or DEFAULT
        uses = metrics.uses
        self.requests = Allowance("requests", uses.requests.labels(self._label))
        self.tokens = Allowance("tokens", uses.tokens.labels(self._label))
        self.images = Allowance("images", uses.images.labels(self._label))
        self.audio = Allowance("audio seconds", uses.audio.labels(self._label), SECOND)
        self.limit(limits)

    def limit(self, limits: TenantLimits) -> None:
        """Other limits from now on."""
        self.rights = Rights(self.rights.name, limits)
        self.requests.bound(limits.requests_per_minute, _MINUTE, self._clock)
        self.tokens.bound(limits.tokens_per_minute, _MINUTE, self._clock)
        self.images.bound(limits.images_per_hour, _HOUR, self._clock)
        self.audio.bound(limits.audio_seconds_per_hour, _HOUR, self._clock)

    @property
    def limits(self) -> TenantLimits:
        return self.rights.limits

    # ------------------------------------------------------------------------------------------------------ admission
    def call(self) -> None:
        """One more request. RateLimited if there were too many."""
        self.spend(self.requests, 1)

    def spend(self, allowance: Allowance, amount: int) -> None:
        """Use an amount that is known. RateLimited if it is not there."""
        self._check(allowance, amount)
        allowance.charge(amount)
        allowance.count(amount)

    def refusal_delay(self) -> float:
        """Seconds to wait before one more refusal is told: the less it waits between two tries, the longer.

        A request that is refused has been read and looked through like any other. Clients that try again at once,
        whatever `Retry-After` says, would take the gateway from all other tenants.
        """
        due = self._refusals.wait(0)
        if due < _LATEST:
            self._refusals.charge(1)
        return due / NANOSECONDS

    def take(self, count: int = 1, *, tokens: int = 0, images: int = 0, audio: int = 0) -> Ticket:
        """Room for `count` replies, with what they will probably use; `audio` in microseconds.

        RateLimited for what is not there now, BadRequest for what never will be; Overloaded and Draining as `Limits`.
        """
        self._check_streams(count)
        self._check_images(images)
        for allowance, amount in ((self.tokens, tokens), (self.images, images), (self.audio, audio)):
            if amount:
                self._check(allowance, amount)
        slot = self._gate.take(count)
        self.streams += count
        return Ticket(self, slot, count, self.tokens.hold(tokens), self.images.hold(images), self.audio.hold(audio))

    @property
    def sockets_full(self) -> bool:
        most = self.limits.concurrent_sockets
        return most is not None and self.sockets >= most

    def open_socket(self) -> None:
        """One more session. Overloaded if there are too many."""
        if self.sockets_full:
            self._refuse("sockets", f"{self.sockets} sessions are open, the most allowed; close one first", 1)
        self.sockets += 1

    def close_socket(self) -> None:
        self.sockets -= 1

    def _check_streams(self, count: int) -> None:
        most = self.limits.concurrent_streams
        if most is None:
            return
        if count > most:
            message = f"`n`: {count} replies at a time are asked for; at most {most} are allowed for this key"
            raise BadRequest(message, param="n")
        if self.streams + count > most:
            what = f"{self.streams} replies are being generated and {count} more would exceed the limit of {most}"
            self._refuse("streams", f"{what}; try again when one has ended", 1)

    def _check_images(self, count: int) -> None:
        most = self.limits.images_per_hour
        if most is not None and count > most:
            message = f"`n`: {count} images are asked for; at most {most} per hour are allowed for this key"
            raise BadRequest(message, param="n")

    def _check(self, allowance: Allowance, amount: int) -> None:
        bucket = allowance.bucket
        if bucket is None or not (wait := bucket.wait(amount)):
            return
        seconds = -(-wait // NANOSECONDS)
        scale = SECOND if allowance is self.audio else 1
        per = "minute" if bucket.period == _MINUTE else "hour"
        left = max(bucket.level, 0) // scale
        what = f"rate limit of {bucket.limit // scale} {allowance.kind} per {per}: {left} are left"
        asked = -(-amount // scale)
        self._refuse(allowance.kind, f"{what}, {asked} are asked for; try again in {seconds} s", seconds)

    def _refuse(self, kind: str, message: str, seconds: int) -> NoReturn:
        self._metrics.uses.refused.labels(self._label, kind.replace(" ", "_")).inc()
        raise RateLimited(message, kind if kind in ("requests", "tokens") else "rate_limit_error", seconds)

    # ----------------------------------------------------------------------------------------------------- what is left
    def headers(self) -> Headers:
        """What is left, as OpenAI's replies tell it; nothing where there is no limit."""
        told: list[tuple[bytes, bytes]] = []
        for allowance in (self.requests, self.tokens):
            if (bucket := allowance.bucket) is not None:
                kind = allowance.kind.encode()
                told.append((b"x-ratelimit-limit-" + kind, b"%d" % bucket.limit))
                told.append((b"x-ratelimit-remaining-" + kind, b"%d" % max(bucket.level, 0)))
                told.append((b"x-ratelimit-reset-" + kind, _duration(bucket.full_in)))
        return told

    def as_rate_limits(self) -> list[dict[str, Any]]:
        """As `rate_limits.updated` tells it. Without limits of its own: those of the server."""
        told = [
            {
                "name": allowance.kind,
                "limit": bucket.limit,
                "remaining": max(bucket.level, 0),
                "reset_seconds": bucket.full_in / NANOSECONDS,
            }
            for allowance in (self.requests, self.tokens)
            if (bucket := allowance.bucket) is not None
        ]
        return told or self._gate.as_rate_limits()


def _duration(nanoseconds: int) -> bytes:
    """As Go writes it, and OpenAI: 1h2m3s, 6m0s, 1.5s, 20ms."""
    milliseconds = -(-nanoseconds // 1_000_000)
    if milliseconds < 1000:
        return b"%dms" % milliseconds
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{rest / 1000:g}s"
    return ((f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + seconds).encode()
