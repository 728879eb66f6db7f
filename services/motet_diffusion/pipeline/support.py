"""Find which pipelines of diffusers are served, and what each can be asked for, from its class.

A pipeline that passes these checks is tried when it is loaded (`trial.py`); what a class alone
decides is refused before any weights are read.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import re
from collections.abc import Mapping
from typing import Any

from motet_models.video_support import FAMILIES

DENOISERS = ("transformer", "unet")
SECOND_DENOISER = "transformer_2"  # of Wan 2.2, for the steps with little noise
DRAW, CHANGE, FILL = "draw", "change", "fill"
# What the class names of a family end with, by kind, where diffusers' auto classes have no entry.
_ENDINGS = {
    CHANGE: ("Img2ImgPipeline", "ImageToVideoPipeline"),
    FILL: ("InpaintPipeline", "InpaintingPipeline"),
}
# Components that read a further picture, which must accompany every request.
_CONTROLS = (
    "controlnet",
    "adapter",
    "image_noising_scheduler",
    "image_normalizer",
    "safety_concept",
)
# Components that draw beside the denoiser.
_FURTHER_MODELS = {
    "unconditional_transformer": "it has two denoisers (its component `unconditional_transformer`)",
    "vision_language_encoder": "another model plans every picture outside of `encode_prompt`, where"
    " pictures take turns (its component `vision_language_encoder`)",
}
# Packages that pipelines of diffusers cannot do without, and Motet does not bring.
_PACKAGES = {
    "Cosmos2TextToImagePipeline": "cosmos_guardrail",
    "WanImageToVideoPipeline": "ftfy",
}
_NOT_COMPARED = ("PRXPipeline",)
# A family's first word begins the names of its pipelines; these are in the names of those for a kind.
_FAMILY = re.compile("[A-Z]+(?![a-z])|[A-Z][a-z]+")
_MARKS = {DRAW: ("Pipeline",), CHANGE: ("Img2Img", "Image", "Edit"), FILL: ("Inpaint",)}
# Inputs that some pipelines require, and no route of a picture has.
_FOREIGN_INPUTS = (
    "control_image",
    "example_image",
    "image_embeds",
    "depth_map",
    "gligen_phrases",
    "source_prompt",
    "editing_prompt",
    "class_labels",
    "token_indices",
    "task_prompt",
)


def pipeline_class(name: str) -> Any:
    """Return diffusers' class of this name; None if it has none."""
    import diffusers

    found = getattr(diffusers, name, None)
    is_pipeline = inspect.isclass(found) and issubclass(found, diffusers.DiffusionPipeline)
    return found if is_pipeline else None


def call_parameters(kind: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a pipeline's `__call__`, by name."""
    return inspect.signature(kind.__call__).parameters


def is_video(kind: Any) -> bool:
    """Return True if pipelines of this class make videos."""
    return "num_frames" in call_parameters(kind)


def refusal(kind: Any) -> str | None:
    """Return why no pipeline of this class is served; None if it has to be tried."""
    components = inspect.signature(kind.__init__).parameters
    parameters = call_parameters(kind)
    package = _PACKAGES.get(kind.__name__, "")
    if package and importlib.util.find_spec(package) is None:
        return f"it needs the package {package}, which is not installed"
    if ".deprecated." in kind.__module__:
        return "diffusers has deprecated it"
    if "prompt" not in parameters:
        return "it does not draw from text (no `prompt`)"
    if hasattr(kind, "_set_pag_attn_processor"):
        return "it exchanges the denoiser's attention during a picture (PAG), as pictures share it"
    for name in _CONTROLS:
        if name in components:
            return f"it needs a further picture with every request (its component `{name}`)"
    for name in _FOREIGN_INPUTS:
        if name in parameters and kind.__name__ not in FAMILIES:
            return f"it needs `{name}` with every request"
    if "layers" in parameters:
        return "it gives several pictures, one for each layer"
    if not any(name in components for name in DENOISERS):
        return f"it chains several models (none of its components is `{'` or `'.join(DENOISERS)}`)"
    if "vae" not in components:
        return "it has no VAE: its pictures are drawn in stages, or in pixels"
    for name, cause in _FURTHER_MODELS.items():
        if name in components:
            return cause
    if not hasattr(kind, "encode_prompt") or hasattr(kind, "encode_prompt_multiple_images"):
        return "it reads its text outside of `encode_prompt`, where pictures take turns"
    is_sized = {"height", "strength"} & parameters.keys() or kind.__name__ in FAMILIES
    if "image" in parameters and not is_sized:
        return "it chooses the size of a picture, which is none of its arguments"
    if (is_video(kind) and kind.__name__ not in FAMILIES) or kind.__name__ in _NOT_COMPARED:
        what = "frames" if is_video(kind) else "pictures"
        return f"its {what} are not compared with those of diffusers"
    return None


def kinds_of(kind: Any) -> tuple[str, ...]:
    """Return what a pipeline of this class may be able to do: draw, change pictures, fill masks."""
    parameters = call_parameters(kind)
    if "mask_image" in parameters:
        return (FILL,)
    if (image := parameters.get("image")) is None:
        return (DRAW,)
    return (CHANGE,) if image.default is inspect.Parameter.empty else (DRAW, CHANGE)


def relatives(pipeline: Any) -> dict[str, Any]:
    """Return pipelines of the same modules for the kinds that `pipeline` itself does not have."""
    own = kinds_of(type(pipeline))
    found = {}
    for kind in (DRAW, CHANGE, FILL):
        if kind in own and len(own) == 1:
            continue
        if (other := _relative(pipeline, kind)) is not None:
            found[kind] = other
    return found


def may_have_relative(name: str, kind: str) -> bool:
    """Return False if no pipeline of diffusers for a kind is called like the one of this name.

    diffusers' own search for relatives imports the pipelines of all families, 30 MB of memory.
    """
    import diffusers

    family = _FAMILY.match(name.removesuffix("Pipeline"))
    return family is None or any(
        other != name and any(mark in other for mark in _MARKS[kind])
        for other in dir(diffusers)
        if other.startswith(family[0]) and other.endswith("Pipeline")
    )


def _relative(pipeline: Any, kind: str) -> Any:
    """Return diffusers' pipeline of the same family for a kind; None if it has none."""
    import diffusers

    if not may_have_relative(type(pipeline).__name__, kind):
        return None
    auto = {
        DRAW: diffusers.AutoPipelineForText2Image,
        CHANGE: diffusers.AutoPipelineForImage2Image,
        FILL: diffusers.AutoPipelineForInpainting,
    }[kind]
    stem = type(pipeline).__name__.removesuffix("Pipeline")
    names = [stem + ending for ending in _ENDINGS.get(kind, ())]
    makers = [
        auto.from_pipe,
        *(
            functools.partial(_of_same_modules, found)
            for name in names
            if (found := pipeline_class(name))
        ),
    ]
    for make in makers:
        try:
            other = make(pipeline)
        except (ValueError, TypeError, AttributeError):
            continue  # the family has no such pipeline, or it needs other components
        if kind in kinds_of(type(other)) and refusal(type(other)) is None:
            other.set_progress_bar_config(disable=True)
            return other
    return None


def _of_same_modules(kind: Any, pipeline: Any) -> Any:
    """Return a pipeline of a class with the modules of `pipeline`, as they are.

    diffusers' own `from_pipe` casts them to float32, or to another type that all of them get.
    """
    uncast: Any = type(kind.__name__, (kind,), {"to": lambda self, **_dtype: self})
    made = uncast.from_pipe(pipeline)
    made.__class__ = kind
    return made
