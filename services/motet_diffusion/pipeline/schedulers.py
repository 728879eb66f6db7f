"""Make schedulers by name, for pictures that ask for another than the model's own.

The names are those that LocalAI and A1111's API have in common with diffusers' documentation; `k_`
stands for Karras' spacing. A scheduler is made of the model's own configuration, as
`Scheduler.from_config(pipeline.scheduler.config)` does. Models of flow matching get the flow form of
a solver. Which of them a pipeline takes is found when it is loaded (`trial.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

_KARRAS = {"use_karras_sigmas": True}
_SDE = {"algorithm_type": "sde-dpmsolver++"}
# diffusers' class and the options of each name, for models that predict noise or velocity.
_DIFFUSION: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "ddim": ("DDIMScheduler", {}),
    "ddpm": ("DDPMScheduler", {}),
    "deis": ("DEISMultistepScheduler", {}),
    "dpm_2": ("KDPM2DiscreteScheduler", {}),
    "dpm_2_a": ("KDPM2AncestralDiscreteScheduler", {}),
    "dpmpp_2m": ("DPMSolverMultistepScheduler", {}),
    "dpmpp_2m_sde": ("DPMSolverMultistepScheduler", _SDE),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler_a": ("EulerAncestralDiscreteScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "k_dpm_2": ("KDPM2DiscreteScheduler", _KARRAS),
    "k_dpmpp_2m": ("DPMSolverMultistepScheduler", _KARRAS),
    "k_dpmpp_2m_sde": ("DPMSolverMultistepScheduler", {**_KARRAS, **_SDE}),
    "k_euler": ("EulerDiscreteScheduler", _KARRAS),
    "k_heun": ("HeunDiscreteScheduler", _KARRAS),
    "k_lms": ("LMSDiscreteScheduler", _KARRAS),
    "k_unipc": ("UniPCMultistepScheduler", _KARRAS),
    "lcm": ("LCMScheduler", {}),
    "lms": ("LMSDiscreteScheduler", {}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
    "unipc": ("UniPCMultistepScheduler", {}),
}
_FLOW_SOLVER = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
# None of those that add noise: loops of flow models have no generator for a scheduler's noise.
_FLOW: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "deis": ("DEISMultistepScheduler", _FLOW_SOLVER),
    "dpmpp_2m": ("DPMSolverMultistepScheduler", _FLOW_SOLVER),
    "euler": ("FlowMatchEulerDiscreteScheduler", {}),
    "heun": ("FlowMatchHeunDiscreteScheduler", {}),
    "k_euler": ("FlowMatchEulerDiscreteScheduler", _KARRAS),
    "unipc": ("UniPCMultistepScheduler", _FLOW_SOLVER),
}


def names_for(scheduler: Any) -> list[str]:
    """Return the names that a model with this scheduler may take; none for kinds of their own."""
    if type(scheduler).__name__ == "SCMScheduler":
        return []
    return sorted(_table(scheduler))


def make_scheduler(name: str, own: Any) -> Any:
    """Return a new scheduler for a picture: by name, or a copy of the model's own for "".

    Raises KeyError for a name that `names_for` does not give.
    """
    if not name:
        return copy.deepcopy(own)
    import diffusers

    class_name, options = _table(own)[name]
    if options.get("use_flow_sigmas"):
        options = {**options, "flow_shift": float(own.config.get("shift") or 1.0)}
    return getattr(diffusers, class_name).from_config(own.config, **options)


def _table(scheduler: Any) -> Mapping[str, tuple[str, Mapping[str, Any]]]:
    config = scheduler.config
    is_flow = (
        type(scheduler).__name__.startswith("FlowMatch")
        or config.get("prediction_type") == "flow_prediction"
        or config.get("use_flow_sigmas")
    )
    return _FLOW if is_flow else _DIFFUSION
