"""Define rules about all instances of a model: their number and the balance of their load."""

from __future__ import annotations

import statistics

from motet_models.omni import talker_name

from .engine import is_out_of_blocks
from .finding import Finding, Layer, found
from .machine import has_free_core
from .window import InstanceWindow, ObservationWindow

# An instance queues if on average QUEUED requests wait there, and some wait in QUEUED_SHARE of its
# heartbeats.
QUEUED = 1.0
QUEUED_SHARE = 0.6
# An instance is hot if it has HOT times the mean requests of the others, the shortest of whose
# queues is at most COLD_QUEUE, and it queues or has CROWD requests.
HOT = 3.0
COLD_QUEUE = 0.25
CROWD = 8.0


def queues(instance: InstanceWindow) -> bool:
    """Return True if requests regularly wait at an instance."""
    return instance.mean("queued") >= QUEUED and instance.share("queued") >= QUEUED_SHARE


def hot_instance(window: ObservationWindow) -> list[Finding]:
    """Find instances with most of the requests while others of the same model have capacity."""
    findings = []
    for model, group in window.by_model("decode").items():
        if len(group) < 2:
            continue
        hot = max(group, key=lambda instance: instance.mean("active"))
        others = [instance for instance in group if instance is not hot]
        rest = statistics.fmean(instance.mean("active") for instance in others)
        cold = min(instance.mean("queued") for instance in others)
        harmed = queues(hot) or hot.mean("active") >= CROWD
        if not harmed or hot.mean("active") < HOT * max(rest, 1.0) or cold > COLD_QUEUE:
            continue
        excess = (hot.mean("active") - rest) * len(others) / len(group)
        findings.append(
            found(
                "hot_instance",
                f"One instance of {model} has most of the requests, and others have free capacity.",
                Layer.L4,
                "routing",
                [hot.name],
                {
                    "active": hot.mean("active"),
                    "queued": hot.mean("queued"),
                    "active_at_others": rest,
                },
                "tokenizer: --routing load (MOTET_ROUTING=load), which ignores where prompts are cached; "
                "or vary the prefix that they have in common",
                cost=max(hot.mean("queued"), excess / 2),
                requests=window.requests,
            )
        )
    return findings


def too_few_decode(window: ObservationWindow) -> list[Finding]:
    """Find models whose requests wait at every decode instance, or for lack of an instance."""
    findings = []
    groups = window.by_model("decode")
    for model in list(groups):  # `stages` has the rule about omni models
        if talker_name(model) in groups:
            del groups[talker_name(model)], groups[model]
    waiting = _waiting_for_any(window)
    for model in sorted(groups.keys() | waiting.keys()):
        group = groups.get(model, [])
        short = [
            instance for instance in group if queues(instance) and not is_out_of_blocks(instance)
        ]
        if len(short) < len(group) or not (short or waiting.get(model, 0.0) >= QUEUED):
            continue
        queued = sum(instance.mean("queued") for instance in group) + waiting.get(model, 0.0)
        findings.append(_too_few(window, model, group, queued))
    return findings


def _too_few(
    window: ObservationWindow, model: str, group: list[InstanceWindow], queued: float
) -> Finding:
    where = (
        ""
        if not group or any(map(has_free_core(window), group))
        else ", on another machine: this one has no free core"
    )
    what = (
        f"Requests wait at every instance of {model}."
        if group
        else f"No instance of {model} takes requests."
    )
    return found(
        "too_few_decode",
        what,
        Layer.L4,
        "decode instances",
        [instance.name for instance in group],
        {
            "queued": queued,
            "running": sum(instance.mean("running") for instance in group),
            "instances": len(group),
            "queue_seconds": window.stage("decode.queue"),
        },
        f"motet scale decode={len(group) + 1}{where}",
        cost=queued,
        requests=window.requests,
    )


def _waiting_for_any(window: ObservationWindow) -> dict[str, float]:
    """Return the requests that tokenizers hold because no instance is available, by model."""
    found: dict[str, float] = {}
    for instance in window.ready("tokenizer"):
        for name in instance.last.load:
            if name.startswith("waiting_for_decode/"):
                model = name.partition("/")[2]
                found[model] = found.get(model, 0.0) + instance.mean(name)
    return found
