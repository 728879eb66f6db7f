"""Admit and account for the calls of a tenant: rights, use so far, and holds of running calls."""

from __future__ import annotations

import time
from copy import copy
from typing import Any, NoReturn

from msgspec.structs import replace

from motet_gateway.http.asgi import Headers
from motet_gateway.http.problems import RateLimited
from motet_shared.errors import BadRequest
from motet_shared.tenants import DEFAULT, TenantLimits

from . import deferral
from .buckets import NANOSECONDS, Allowance, Bucket, Clock, Hold
from .concurrency import ConcurrencyLimits, Slot
from .counters import TenantCounters
from .rights import Rights
from .shared_bucket import Accounts
from .slots import Slots

SECOND = 1_000_000  # units of audio: microseconds
_MINUTE, _HOUR = 60, 3600
_UNDELAYED = 20  # refusals that are sent without delay, and per second after that
_LONGEST_DELAY = 2 * NANOSECONDS  # longest delay of a refusal


class Ticket:
    """Hold what one call reserves: slots, and amounts of limited resources.

    Leaving its block gives back what was not used.
    """

    __slots__ = ("_count", "_slot", "_tenant", "audio", "images", "tokens")

    def __init__(
        self, tenant: Tenant, slot: Slot, count: int, tokens: Hold, images: Hold, audio: Hold
    ):
        self._tenant, self._slot, self._count = tenant, slot, count
        self.tokens, self.images, self.audio = tokens, images, audio

    @property
    def is_background(self) -> bool:
        """Return True for a request of a batch."""
        return self._tenant.rights.background

    def release(self) -> None:
        """Release slots and unused amounts. A second call does nothing."""
        self._slot.release()
        self._tenant.streams.close(self._count)
        self._count = 0
        self.settle()

    def settle(self) -> None:
        """Give back unused amounts, as no more will be used; the slots stay reserved."""
        holds = (self.tokens, self.images, self.audio)
        if (deferred := deferral.current()) is not None:
            deferred.add(holds)
            return
        for hold in holds:
            hold.settle()

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Tenant:
    """Account for one tenant since it first appeared. `name`: "" where no key is required."""

    def __init__(
        self,
        name: str,
        limits: TenantLimits,
        concurrency: ConcurrencyLimits,
        counters: TenantCounters,
        clock: Clock = time.monotonic_ns,
    ):
        self.rights = Rights(name, limits)
        self.streams, self.sockets = Slots(), Slots()
        self._concurrency, self._counters, self._clock = concurrency, counters, clock
        self._refusals = Bucket(_UNDELAYED, 1, clock)
        self._label = name or DEFAULT
        self.requests = Allowance("requests", counters.requests.labels(self._label))
        self.tokens = Allowance("tokens", counters.tokens.labels(self._label))
        self.images = Allowance("images", counters.images.labels(self._label))
        self.audio = Allowance("audio seconds", counters.audio.labels(self._label), SECOND)
        self.limit(limits)

    def share(self, accounts: Accounts) -> None:
        """Share limits and use with all gateways that have these accounts."""
        for one in (self.requests, self.tokens, self.images, self.audio):
            one.share(accounts.of(self._label, one.kind, one.scale))
        for kind, slots in (("streams", self.streams), ("sockets", self.sockets)):
            slots.lease = accounts.lease_of(self._label, kind, slots)

    def limit(self, limits: TenantLimits) -> None:
        """Replace the limits."""
        self.rights = Rights(self.rights.name, limits)
        self.streams.limit = limits.concurrent_streams
        self.sockets.limit = limits.concurrent_sockets
        self.requests.bound(limits.requests_per_minute, _MINUTE, self._clock)
        self.tokens.bound(limits.tokens_per_minute, _MINUTE, self._clock)
        self.images.bound(limits.images_per_hour, _HOUR, self._clock)
        self.audio.bound(limits.audio_seconds_per_hour, _HOUR, self._clock)

    @property
    def owner(self) -> str:
        """Return the name under which images and jobs are kept; "" for the default tenant."""
        return "" if self.rights.name == DEFAULT else self.rights.name

    @property
    def limits(self) -> TenantLimits:
        return self.rights.limits

    def in_background(self, concurrency: ConcurrencyLimits) -> Tenant:
        """Return the tenant for its batches: with its allowances, but slots and rights of its own."""
        twin = copy(self)
        limits = replace(self.limits, concurrent_streams=None)
        twin.rights = Rights(self.rights.name, limits, background=True)
        twin.streams, twin._concurrency = Slots(), concurrency
        return twin

    # ------------------------------------------------------------------------------------ admission
    def count_request(self) -> None:
        """Count one more request. Raises RateLimited if there were too many."""
        self.spend(self.requests, 1)

    def spend(self, allowance: Allowance, amount: int) -> None:
        """Use a known amount. Raises RateLimited if it is not available."""
        self._check(allowance, amount)
        allowance.charge(amount)
        allowance.count(amount)

    def charge_refusal(self, tokens: int) -> None:
        """Charge what a refused prompt has cost, in tokens, into debt if need be."""
        self.tokens.charge(tokens)
        self.tokens.count(tokens)

    def check_solvent(self) -> None:
        """Raise RateLimited if no token is left: nothing large is decoded for a tenant in debt."""
        self._check(self.tokens, 1)

    def refusal_delay(self) -> float:
        """Return the seconds to delay one more refusal; longer the faster a client retries.

        A refused request has been read and parsed like any other. Without a delay, clients that
        retry at once, whatever `Retry-After` says, would take the gateway from all other tenants.
        """
        due = self._refusals.wait(0)
        if due < _LONGEST_DELAY:
            self._refusals.charge(1)
        return due / NANOSECONDS

    async def prepare(self) -> None:
        """Have a request and a token here, if limits are shared with other gateways."""
        await self.requests.fetch(1)
        await self.tokens.fetch(1)

    async def take(
        self, count: int = 1, *, tokens: int = 0, images: int = 0, audio: int = 0
    ) -> Ticket:
        """Reserve room for `count` replies and their probable use; `audio` in microseconds.

        Raises as `take_now`, which it calls with what other gateways leave.
        """
        for allowance, amount in (
            (self.tokens, tokens),
            (self.images, images),
            (self.audio, audio),
        ):
            await allowance.fetch(amount)
        await self.streams.fetch(count)
        return self.take_now(count, tokens=tokens, images=images, audio=audio)

    def take_now(
        self,
        count: int = 1,
        *,
        tokens: int = 0,
        images: int = 0,
        audio: int = 0,
        is_admitted: bool = False,
    ) -> Ticket:
        """Reserve as `take`, without asking what other gateways leave.

        is_admitted: another gateway has admitted them, and this one refuses none.

        Raises RateLimited for what is not available now, BadRequest for what never will be;
        Overloaded and Draining as `ConcurrencyLimits`.
        """
        if not is_admitted:
            self._check_streams(count)
            self._check_images(images)
            for allowance, amount in (
                (self.tokens, tokens),
                (self.images, images),
                (self.audio, audio),
            ):
                if amount:
                    self._check(allowance, amount)
        slot = self._concurrency.take(count, is_admitted=is_admitted)
        self.streams.open += count
        return Ticket(
            self,
            slot,
            count,
            self.tokens.hold(tokens),
            self.images.hold(images),
            self.audio.hold(audio),
        )

    def hold_audio(self, amount: int, *, is_admitted: bool = False) -> Hold:
        """Hold microseconds of audio for a part of a running reply.

        is_admitted: as in `take_now`.

        Raises RateLimited if they are not available. The caller settles the hold.
        """
        if not is_admitted:
            self._check(self.audio, amount)
        return self.audio.hold(amount)

    @property
    def sockets_full(self) -> bool:
        return not self.sockets.has(1)

    def open_socket(self, *, is_admitted: bool = False) -> None:
        """Count one more session. Raises Overloaded if there are too many, unless it was admitted."""
        if self.sockets_full and not is_admitted:
            most = self.limits.concurrent_sockets
            self._refuse(
                "sockets", f"{most} sessions are open, the most allowed; close one first", 1
            )
        self.sockets.open += 1

    def _check_streams(self, count: int) -> None:
        most = self.limits.concurrent_streams
        if most is None:
            return
        if count > most:
            message = (
                f"`n`: {count} replies were requested at a time; this key allows at most {most}"
            )
            raise BadRequest(message, param="n")
        if not self.streams.has(count):
            running = most - self.streams.free
            what = f"{running} replies are being generated and {count} more would exceed the limit"
            self._refuse("streams", f"{what} of {most}; try again when one has ended", 1)

    def _check_images(self, count: int) -> None:
        most = self.limits.images_per_hour
        if most is not None and count > most:
            message = f"`n`: {count} images were requested; this key allows at most {most} per hour"
            raise BadRequest(message, param="n")

    def _check(self, allowance: Allowance, amount: int) -> None:
        bucket = allowance.bucket
        if bucket is None or not (wait := bucket.wait(amount)):
            return
        seconds = -(-wait // NANOSECONDS)
        scale = SECOND if allowance is self.audio else 1
        per = "minute" if bucket.period == _MINUTE else "hour"
        left = max(bucket.level, 0) // scale
        what = f"rate limit of {bucket.limit // scale} {allowance.kind} per {per}: {left} remain"
        asked = -(-amount // scale)
        self._refuse(
            allowance.kind, f"{what}, {asked} were requested; try again in {seconds} s", seconds
        )

    def _refuse(self, kind: str, message: str, seconds: int) -> NoReturn:
        self._counters.refused.labels(self._label, kind.replace(" ", "_")).inc()
        raise RateLimited(
            message, kind if kind in ("requests", "tokens") else "rate_limit_error", seconds
        )

    # ----------------------------------------------------------------------------- remaining limits
    def headers(self) -> Headers:
        """Return OpenAI's `x-ratelimit-*` headers; none for a resource without a limit."""
        headers: list[tuple[bytes, bytes]] = []
        for allowance in (self.requests, self.tokens):
            if (bucket := allowance.bucket) is not None:
                kind = allowance.kind.encode()
                headers.append((b"x-ratelimit-limit-" + kind, b"%d" % bucket.limit))
                headers.append((b"x-ratelimit-remaining-" + kind, b"%d" % max(bucket.level, 0)))
                headers.append((b"x-ratelimit-reset-" + kind, _duration(bucket.full_in)))
        return headers

    def as_rate_limits(self) -> list[dict[str, Any]]:
        """Return the entries of `rate_limits.updated`: the tenant's, or else the server's."""
        limits = [
            {
                "name": allowance.kind,
                "limit": bucket.limit,
                "remaining": max(bucket.level, 0),
                "reset_seconds": bucket.full_in / NANOSECONDS,
            }
            for allowance in (self.requests, self.tokens)
            if (bucket := allowance.bucket) is not None
        ]
        return limits or self._concurrency.as_rate_limits()


def _duration(nanoseconds: int) -> bytes:
    """Format a duration like Go, as OpenAI does: 1h2m3s, 6m0s, 1.5s, 20ms."""
    milliseconds = -(-nanoseconds // 1_000_000)
    if milliseconds < 1000:
        return b"%dms" % milliseconds
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    seconds = f"{rest / 1000:g}s"
    return (
        (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + seconds
    ).encode()
