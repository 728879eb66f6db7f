"""Define rules about a single engine: the composition of its steps and the size of its cache."""

from __future__ import annotations

from .finding import Finding, Layer, found
from .window import InstanceWindow, ObservationWindow

# Prefill delays decoding if mixed steps (with both) take STRETCH times as long as decode-only
# steps, and engines spend STRETCHED_SHARE of their decoding time in them. `decode_slowdown` keeps
# the first at 1.8.
STRETCH = 4.0
STRETCHED_SHARE = 0.25
STRETCHED_STEPS = 3  # minimum for a finding
# A cache is too small if RECOMPUTED_SHARE of the computed tokens had been cached before,
RECOMPUTED_SHARE = 0.1
RECOMPUTED_TOKENS = 64  # minimum for a finding
# or if requests wait while less than FREE_BLOCKS of the blocks is free, or if there is a preemption
# every PREEMPTIONS_EVERY seconds.
FREE_BLOCKS = 0.1
PREEMPTIONS_EVERY = 2.0


def prefill_blocks_decode(window: ObservationWindow) -> list[Finding]:
    """Find engines whose streams stall while prompts are computed in the same steps."""
    findings = []
    for instance in window.ready("decode"):
        steps = instance.growth("mixed_steps")
        alone = _step_alone(instance)
        if steps < STRETCHED_STEPS or not alone:
            continue
        seconds, tokens = instance.growth("mixed_seconds"), instance.growth("mixed_tokens") / steps
        stretch = seconds / steps / alone
        share = seconds / (seconds + instance.growth("decode_seconds"))
        if stretch < STRETCH or share < STRETCHED_SHARE:
            continue
        lost = (seconds - steps * alone) / max(instance.seconds, seconds)
        findings.append(
            found(
                "prefill_blocks_decode",
                "Token streams stall while prompts are computed: steps that do both take much longer.",
                Layer.L3,
                "steps of the engine",
                [instance.name],
                {
                    "stretch": stretch,
                    "share_of_decoding": share,
                    "prefilled_tokens_per_step": tokens,
                },
                f"decode: --decode-slowdown 1.8 or --token-budget {_budget(tokens, stretch)} "
                f"(MOTET_DECODE_SLOWDOWN, MOTET_TOKEN_BUDGET); or prefill on other instances: motet up --prefill 1",
                cost=lost * max(instance.mean("running"), 1.0),
                requests=window.requests,
            )
        )
    return findings


def _step_alone(instance: InstanceWindow) -> float:
    """Return the seconds of a decode-only step in the window.

    If the window has too few of them, this is the mean over the instance's lifetime.
    """
    steps = instance.growth("decode_steps")
    if steps >= STRETCHED_STEPS:
        return instance.growth("decode_seconds") / steps
    return instance.now("decode_seconds") / max(instance.now("decode_steps"), 1.0)


def _budget(tokens: float, stretch: float) -> int:
    """Return a power of two as token budget that stretches steps about half as much as allowed."""
    budget = 16
    while budget * 2 <= tokens * (STRETCH / 2 - 1) / (stretch - 1):
        budget *= 2
    return budget


def cache_too_small(window: ObservationWindow) -> list[Finding]:
    """Find engines that recompute evicted prefixes, or whose requests wait for blocks."""
    findings = []
    for instance in window.ready("decode"):
        recomputed = instance.growth("recomputed_tokens")
        share = recomputed / max(instance.growth("tokens"), recomputed, 1.0)
        preempted = instance.rate("preemptions")
        waits = is_out_of_blocks(instance)
        lost = recomputed >= RECOMPUTED_TOKENS and share >= RECOMPUTED_SHARE
        if not (lost or waits or preempted > 1 / PREEMPTIONS_EVERY):
            continue
        numbers = {
            "recomputed_share": share,
            "recomputed_tokens": recomputed,
            "evictions": instance.growth("evictions"),
            "preemptions": instance.growth("preemptions"),
            "free": instance.mean("kv_free"),
        }
        computing = (
            recomputed * instance.now("prefill_token") / instance.seconds
            if instance.seconds
            else 0.0
        )
        findings.append(
            found(
                "cache_too_small",
                "Requests wait for free blocks of the KV cache."
                if waits
                else "The KV cache evicts prefixes that are requested again: they are recomputed.",
                Layer.L2,
                "blocks of the KV cache",
                [instance.name],
                numbers,
                f"decode: --kv-memory {_twice(instance)} (MOTET_KV_MEMORY), or --host-cache {_twice(instance)} "
                "(MOTET_HOST_CACHE) to keep evicted blocks; or add an instance: motet scale decode="
                f"{len(window.ready('decode')) + 1}",
                cost=computing * max(instance.mean("running"), 1.0)
                + (instance.mean("queued") if waits else 0.0),
                requests=window.requests,
            )
        )
    return findings


def is_out_of_blocks(instance: InstanceWindow) -> bool:
    """Return True if requests wait at an instance because its KV cache is nearly full."""
    return (
        "kv_free" in instance.last.load
        and instance.mean("kv_free") < FREE_BLOCKS
        and instance.mean("queued") >= 1
    )


def _twice(instance: InstanceWindow) -> str:
    """Return twice the size of the KV cache as a setting, in MiB."""
    return f"{max(2, -(-2 * int(instance.now('kv_bytes')) // 2**20))}MiB"
