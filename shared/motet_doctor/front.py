"""Define rules about what precedes the engines: gateways, tokenizers, and clients."""

from __future__ import annotations

import statistics

from .finding import Finding, Layer, found
from .window import Seen, Window

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


def is_full(seen: Seen) -> bool:
    """Return True if the instance's event loop has no spare time."""
    return seen.loop >= LOOP and seen.rate("loop_cpu") >= LOOP_CPU


def gateway_bound(window: Window) -> list[Finding]:
    """Find gateways whose event loop has no spare time."""
    gateways = window.ready("gateway")
    return [
        found(
            "gateway_bound",
            "A gateway computes all the time: what passes through it waits for its one thread.",
            Layer.L5,
            "event loop of the gateway",
            [seen.name],
            _loop_numbers(seen)
            | {"streams": seen.mean("streams"), "requests_per_second": seen.rate("http_requests")},
            f"motet scale gateway={len(gateways) + 1}: it takes connections from the same socket",
            cost=max(seen.mean("streams"), 1.0) * seen.loop,
            requests=window.requests,
        )
        for seen in gateways
        if is_full(seen)
    ]


def _loop_numbers(seen: Seen) -> dict[str, float]:
    return {
        "loop": min(seen.loop, 1.0),
        "core_share": seen.rate("loop_cpu"),
        "late_share": seen.rate("timer_lag"),
    }


def tokenizer_bound(window: Window) -> list[Finding]:
    """Find tokenizers without spare time, on event loops or on threads that encode long prompts."""
    tokenizers = window.ready("tokenizer")
    encoding = _encoding(window)
    full = [seen for seen in tokenizers if is_full(seen)]
    busy = [
        seen for seen in tokenizers if encoding >= ENCODING and seen.rate("cpu") >= ENCODING_CPU
    ]
    if not full and (not busy or len(busy) < len(tokenizers)):
        return []
    held = full or busy
    worst = max(held, key=lambda seen: seen.rate("cpu"))
    active = sum(seen.mean("active") for seen in held)
    return [
        found(
            "tokenizer_bound",
            "Tokenizers compute all the time: prompts wait to be encoded, and tokens to become text.",
            Layer.L5,
            "CPU of the tokenizer",
            [seen.name for seen in held],
            _loop_numbers(worst)
            | {"cores": worst.rate("cpu"), "encoding_share": encoding, "active": active},
            f"motet scale tokenizer={len(tokenizers) + 1}",
            cost=max(active, 1.0) * max(worst.loop if full else 0.0, encoding),
            requests=window.requests,
        )
    ]


def _encoding(window: Window) -> float:
    """Return the mean share of encoding in the time to first token."""
    shares = [
        min(1.0, timing.get("tokenizer.encode", 0.0) / first)
        for timing in window.timings
        if (first := timing.get("gateway.first", 0.0)) > 0
    ]
    return statistics.fmean(shares) if shares else 0.0


def slow_client(window: Window) -> list[Finding]:
    """Find gateways whose replies wait for clients that do not read them."""
    held = [seen for seen in window.ready("gateway") if seen.mean("unread_replies") >= UNREAD]
    if not held:
        return []
    unwritten = sum(seen.mean("unread_replies") for seen in held)
    engines = window.ready("decode")
    return [
        found(
            "slow_client",
            "Clients do not read: their replies stand still, and keep their places in the cache.",
            Layer.L6,
            "connections of clients",
            [seen.name for seen in held],
            {
                "unread_replies": unwritten,
                "unread_at_tokenizers": sum(
                    seen.mean("unread") for seen in window.ready("tokenizer")
                ),
                "unread_at_decode": sum(seen.mean("unread") for seen in engines),
                "cache_free": min(
                    (seen.mean("kv_free") for seen in engines if "kv_free" in seen.last.load),
                    default=1.0,
                ),
            },
            "nothing here is short: have the client read, or ask without stream; gateway: --request-timeout 60s ends "
            "such replies sooner (MOTET_REQUEST_TIMEOUT), tokenizer: --window 16 computes less ahead for them "
            "(MOTET_WINDOW)",
            cost=unwritten,
            requests=window.requests,
        )
    ]
