"""Define the rule about stages besides language models: encoders, recognizers, voices, omni models."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from motet_models.omni import talker_name

from .finding import Finding, Layer, found
from .fleet import queues
from .machine import has_free_core
from .window import InstanceWindow, ObservationWindow

# A stage of an omni model limits its replies if its engines compute BUSY of the time, more than those
# of its other stages, and REPLIES or more are under way there.
BUSY = 0.8
REPLIES = 2.0
_ALONE = ("encoder", "asr", "tts")  # roles that are short where requests wait at all instances
_OMNI = ("encoder", "tts")  # of these, those that are stages of omni models


@dataclass(frozen=True)
class Stage:
    """Hold the ready instances that compute one stage of a model.

    name: what `motet scale` calls it.
    """

    name: str
    model: str
    instances: Sequence[InstanceWindow]

    @property
    def busy(self) -> float:
        """Return the share of the time in which its engines compute."""
        return statistics.fmean(min(one.rate("engine_busy"), 1.0) for one in self.instances)

    @property
    def waits(self) -> bool:
        """Return True if requests wait at all instances."""
        return all(map(queues, self.instances))

    def total(self, name: str) -> float:
        return sum(one.mean(name) for one in self.instances)


def stage_limits(window: ObservationWindow) -> list[Finding]:
    """Find the stage of each model that its replies wait for, where that is no language model's queue."""
    findings, models = [], _omni_models(window)
    for stages in models.values():
        limiting = max(stages, key=lambda stage: (stage.waits, stage.busy))
        at_work = limiting.total("running") + limiting.total("queued")
        if limiting.waits or (limiting.busy >= BUSY and at_work >= REPLIES):
            findings.append(_finding(window, limiting, stages))
    for role in _ALONE:
        for model, group in window.by_model(role).items():
            stage = Stage(role, model, group)
            if stage.waits and not (model in models and role in _OMNI):
                findings.append(_finding(window, stage, [stage]))
    return findings


def _omni_models(window: ObservationWindow) -> dict[str, list[Stage]]:
    """Return the stages of each model that has a talker."""
    decode, models = window.by_model("decode"), {}
    for model, thinker in decode.items():
        if (talker := decode.get(talker_name(model))) is None:
            continue
        stages = [
            Stage("encoder", model, window.by_model("encoder").get(model, [])),
            Stage("decode", model, thinker),
            Stage("talker", model, talker),
            Stage("code2wav", model, window.by_model("tts").get(model, [])),
        ]
        models[model] = [stage for stage in stages if stage.instances]
    return models


def _finding(window: ObservationWindow, stage: Stage, stages: Sequence[Stage]) -> Finding:
    count = len(stage.instances)
    is_full = not any(map(has_free_core(window), stage.instances))
    where = ", on another machine: this one has no free core" if is_full else ""
    running, queued = stage.total("running"), stage.total("queued")
    shares = {f"{one.name}_busy": one.busy for one in stages}
    what = (
        f"Requests wait for the {stage.name} of {stage.model}."
        if stage.waits
        else f"The {stage.name} of {stage.model} limits its replies: no other stage computes as long."
    )
    return found(
        "stage_limits",
        what,
        Layer.L4,
        f"{stage.name} instances",
        [one.name for one in stage.instances],
        {**shares, "running": running, "queued": queued, "instances": count},
        f"motet scale {stage.name}={count + 1}{where}",
        cost=max(queued, (running + queued) * stage.busy / 2),
        requests=window.requests,
    )
