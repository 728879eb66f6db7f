"""Define rules about what precedes the engines: gateways, tokenizers, and clients."""

from __future__ import annotations

import statistics

from .finding import Finding, Layer, found
from .window import InstanceWindow, ObservationWindow

# An event loop is full if it computes for LOOP of the time in which it could have a core, and uses
# at least LOOP_CPU of a core: below that, other processes take its time.
LOOP = 0.85
LOOP_CPU = 0.1
# Tokenizer threads delay replies if encoding takes ENCODING of the time to first token, and
# ENCODING_CPU of a core.
ENCODING = 0.5
ENCODING_CPU = 0.6
# Clients are slow if, on average, UNREAD replies wait for a client that does not read.
UNREAD = 0.5


def is_full(instance: InstanceWindow) -> bool:
    """Return True if the instance's event loop has no spare time."""
    return instance.loop >= LOOP and instance.rate("loop_cpu") >= LOOP_CPU


def gateway_bound(window: ObservationWindow) -> list[Finding]:
    """Find gateways whose event loop has no spare time."""
    gateways = window.ready("gateway")
    return [
        found(
            "gateway_bound",
            "A gateway's event loop is saturated: all of its connections wait for its one thread.",
            Layer.L5,
            "event loop of the gateway",
            [instance.name],
            _loop_numbers(instance)
            | {
                "streams": instance.mean("streams"),
                "requests_per_second": instance.rate("http_requests"),
            },
            f"motet scale gateway={len(gateways) + 1}; both accept connections of the same socket",
            cost=max(instance.mean("streams"), 1.0) * instance.loop,
            requests=window.requests,
        )
        for instance in gateways
        if is_full(instance)
    ]


def _loop_numbers(instance: InstanceWindow) -> dict[str, float]:
    return {
        "loop": min(instance.loop, 1.0),
        "core_share": instance.rate("loop_cpu"),
        "late_share": instance.rate("timer_lag"),
    }


def tokenizer_bound(window: ObservationWindow) -> list[Finding]:
    """Find tokenizers without spare time, on event loops or on threads that encode long prompts."""
    tokenizers = window.ready("tokenizer")
    encoding = _encoding(window)
    full = [instance for instance in tokenizers if is_full(instance)]
    busy = [
        instance
        for instance in tokenizers
        if encoding >= ENCODING and instance.rate("cpu") >= ENCODING_CPU
    ]
    if not full and (not busy or len(busy) < len(tokenizers)):
        return []
    affected = full or busy
    worst = max(affected, key=lambda instance: instance.rate("cpu"))
    active = sum(instance.mean("active") for instance in affected)
    return [
        found(
            "tokenizer_bound",
            "Tokenizers are saturated: prompts wait to be encoded, and tokens to be decoded.",
            Layer.L5,
            "CPU of the tokenizer",
            [instance.name for instance in affected],
            _loop_numbers(worst)
            | {"cores": worst.rate("cpu"), "encoding_share": encoding, "active": active},
            f"motet scale tokenizer={len(tokenizers) + 1}",
            cost=max(active, 1.0) * max(worst.loop if full else 0.0, encoding),
            requests=window.requests,
        )
    ]


def _encoding(window: ObservationWindow) -> float:
    """Return the mean share of encoding in the time to first token."""
    shares = [
        min(1.0, timing.get("tokenizer.encode", 0.0) / first)
        for timing in window.timings
        if (first := timing.get("gateway.first", 0.0)) > 0
    ]
    return statistics.fmean(shares) if shares else 0.0


def slow_client(window: ObservationWindow) -> list[Finding]:
    """Find gateways whose replies wait for clients that do not read them."""
    affected = [
        instance
        for instance in window.ready("gateway")
        if instance.mean("unread_replies") >= UNREAD
    ]
    if not affected:
        return []
    unread = sum(instance.mean("unread_replies") for instance in affected)
    engines = window.ready("decode")
    return [
        found(
            "slow_client",
            "Clients do not read: their replies stall, and hold blocks of the KV cache.",
            Layer.L6,
            "connections of clients",
            [instance.name for instance in affected],
            {
                "unread_replies": unread,
                "unread_at_tokenizers": sum(
                    instance.mean("unread") for instance in window.ready("tokenizer")
                ),
                "unread_at_decode": sum(instance.mean("unread") for instance in engines),
                "cache_free": min(
                    (
                        instance.mean("kv_free")
                        for instance in engines
                        if "kv_free" in instance.last.load
                    ),
                    default=1.0,
                ),
            },
            "the stack has capacity: have clients read their streams, or request without `stream`; "
            "gateway: --request-timeout 60s ends such replies sooner (MOTET_REQUEST_TIMEOUT), "
            "tokenizer: --window 16 computes fewer tokens ahead for them (MOTET_WINDOW)",
            cost=unread,
            requests=window.requests,
        )
    ]
