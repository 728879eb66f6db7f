"""Write docs/pictures.md: which pipelines of diffusers draw, change and fill pictures here.

.venv/bin/python scripts/list_pictures.py
"""

from __future__ import annotations

import inspect
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from motet_diffusion.config import EngineConfig  # noqa: E402
from motet_diffusion.pipeline.pipeline_factory import PipelineFactory  # noqa: E402
from motet_diffusion.pipeline.support import call_parameters, refusal  # noqa: E402
from motet_shared.errors import ConfigError  # noqa: E402
from support.families import picture_families  # noqa: E402

PAGE = ROOT / "docs" / "pictures.md"
KINDS = ("draw", "change", "fill")
# Pipelines of other things than pictures, by words in the names of their packages.
_OTHER_PACKAGES = (
    "audio",
    "video",
    "music",
    "ace_step",
    "allegro",
    "animatediff",
    "anyflow",
    "chronoedit",
    "consisid",
    "easyanimate",
    "helios",
    "latte",
    "ltx",
    "lucy",
    "marigold",
    "mochi",
    "shap_e",
    "skyreels",
    "wan.",
    "llada2",
    "diffusion_gemma",
    "rfd4",
    "sana_wm",
    "onnx",
    "i2vgen",
    "pia",
    "text_to_video",
)

HEAD = """# Pictures

Which pipelines of diffusers {version} are served, by the `_class_name` of their model_index.json, and the cause
where one is refused. A pipeline is tried when its folder is loaded: it draws a small picture of every kind with its
own denoiser, and a kind that fails is left out, or the folder refused with the cause. So a request never meets it.

## Exact

On a tiny model of the class with random float32 weights, pictures equal those of diffusers' own call with the same
arguments and `torch.Generator().manual_seed(seed)` within one of 255 per value, alone and together with others
(`tests/unit/motet_diffusion/test_picture_pipelines.py`). The arguments that a request has no field for:

* pipelines with `true_cfg_scale` and no guidance in their weights (Qwen-Image) get the request's guidance there, and
  `" "` as the negative prompt if a request has none, as without one they do not guide;
* Kontext gets `max_area` of the requested size and `_auto_resize=False`, HiDream a `default_sample_size` of its area,
  Kandinsky 5 the size as its only one (`resolutions`), PixArt and Sana `use_resolution_binning=False`, so that a
  picture has the size that was asked for;
* HunyuanImage gets the guidance as `distilled_guidance_scale`, and as the `guidance_scale` of its guider.

*Draws*, *changes* (with an image), *fills* (with an image and a mask). *Batched*: calls at different steps share a
forward pass, where their shapes and the lengths of their texts are equal; found when the model is loaded.

| pipeline | draws | changes | fills | batched |
|---|---|---|---|---|
"""
REFUSED = """
## Refused

Refused when they are loaded, with the cause that is given here.

| pipeline | cause |
|---|---|
"""


@dataclass(frozen=True)
class ExactRow:
    """Hold what the page says of a pipeline that is served."""

    kinds: list[str]
    is_batched: bool


def picture_classes() -> dict[str, Any]:
    """Return diffusers' pipelines that draw pictures from text, by name."""
    found = {}
    for name in dir(diffusers):
        kind = getattr(diffusers, name, None) if name.endswith("Pipeline") else None
        if not inspect.isclass(kind) or not issubclass(kind, DiffusionPipeline):
            continue
        package = kind.__module__.removeprefix("diffusers.pipelines.")
        if kind is DiffusionPipeline or any(word in package for word in _OTHER_PACKAGES):
            continue
        if "prompt" in call_parameters(kind) and "num_frames" not in call_parameters(kind):
            found[name] = kind
    return found


def tried(name: str) -> tuple[ExactRow | None, str]:
    """Return what a tiny model of a class is found to do, else the cause of its refusal."""
    with tempfile.TemporaryDirectory() as folder:
        path = picture_families.write(name, Path(folder) / "model")
        try:
            factory = PipelineFactory(EngineConfig(model=str(path)))
        except ConfigError as error:
            cause = str(error).split(" is not supported: ")[-1]
            return None, cause.removesuffix("; docs/pictures.md lists others")
        kinds = [kind for kind in KINDS if kind in factory.rules.kinds]
        return ExactRow(kinds, factory.merges), ""


def page() -> str:
    """Return the page."""
    exact, refused = list[str](), list[str]()
    for name, kind in picture_classes().items():
        row, cause = None, refusal(kind)
        if cause is None:
            row, cause = tried(name)
        if row is None:
            refused.append(f"| {name} | {cause} |")
            continue
        cells = ["yes" if kind in row.kinds else "" for kind in KINDS]
        cells.append("yes" if row.is_batched else "")
        exact.append(f"| {name} | " + " | ".join(cells) + " |")
    head = HEAD.format(version=diffusers.__version__) + "\n".join(exact) + "\n"
    return head + REFUSED + "\n".join(refused) + "\n"


def exact_rows(text: str) -> dict[str, ExactRow]:
    """Return the rows of the page's table of exact pipelines, by name."""
    rows = {}
    for name, *cells in _cells(text, "Exact"):
        kinds = [kind for kind, cell in zip(KINDS, cells, strict=False) if cell == "yes"]
        rows[name] = ExactRow(kinds, cells[3] == "yes")
    return rows


def refused_rows(text: str) -> dict[str, str]:
    """Return the causes of the refused pipelines, by name."""
    return {name: cause for name, cause in _cells(text, "Refused")}


def _cells(text: str, heading: str) -> list[list[str]]:
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def main() -> None:
    """Run as a script."""
    torch.set_num_threads(1)
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
