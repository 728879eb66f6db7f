"""List all rules, and order their findings."""

from __future__ import annotations

from collections.abc import Callable

from .engine import cache_too_small, prefill_blocks_decode
from .finding import Finding
from .fleet import hot_instance, too_few_decode
from .front import gateway_bound, slow_client, tokenizer_bound
from .gpus import gpu_unused
from .kernels import kernels_fallback
from .machine import cpu_short
from .stages import stage_limits
from .window import ObservationWindow

MIN_SECONDS = 1.0  # seconds; findings from shorter observations are noise

Rule = Callable[[ObservationWindow], list[Finding]]

RULES: tuple[Rule, ...] = (
    cpu_short,
    gpu_unused,
    kernels_fallback,
    cache_too_small,
    prefill_blocks_decode,
    hot_instance,
    too_few_decode,
    stage_limits,
    gateway_bound,
    tokenizer_bound,
    slow_client,
)
# Names of findings.
NAMES = (
    "cpu_neighbour",
    "cpu_full",
    "gpu_unused",
    "kernels_fallback",
    "cache_too_small",
    "prefill_blocks_decode",
    "hot_instance",
    "too_few_decode",
    "stage_limits",
    "gateway_bound",
    "tokenizer_bound",
    "slow_client",
)


def diagnose(window: ObservationWindow) -> list[Finding]:
    """Return all findings, the one that delays most requests first.

    Instances that were observed for less than `MIN_SECONDS` are ignored.
    """
    known = [instance for instance in window.instances if instance.seconds >= MIN_SECONDS]
    names = {instance.name for instance in known}
    machines = [
        kept
        for machine in window.machines
        if (kept := [instance for instance in machine if instance.name in names])
    ]
    observed = ObservationWindow(known, window.timings, machines)
    return sorted(
        (finding for rule in RULES for finding in rule(observed)), key=lambda finding: -finding.cost
    )
