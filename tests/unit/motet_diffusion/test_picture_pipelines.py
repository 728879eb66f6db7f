"""Test that every pipeline that docs/pictures.md calls exact draws what diffusers draws, and the rest is refused."""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.pipelines import auto_pipeline
from PIL import Image

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

from list_pictures import PAGE, exact_rows, picture_classes, refused_rows  # noqa: E402
from motet_diffusion.config import EngineConfig  # noqa: E402
from motet_diffusion.engine.request import PictureRequest  # noqa: E402
from motet_diffusion.pipeline.loading import (  # noqa: E402
    lone_tokenizers,
    missing_parts,
    processors,
    read,
)
from motet_diffusion.pipeline.pipeline_factory import PipelineFactory  # noqa: E402
from motet_diffusion.pipeline.support import (  # noqa: E402
    CHANGE,
    DRAW,
    FILL,
    may_have_relative,
    pipeline_class,
)
from motet_shared.errors import BadRequest, ConfigError, UnsupportedParameter  # noqa: E402
from support.engine.recording_engine import Pixels, RecordingEngine, assert_alike  # noqa: E402
from support.families import picture_families  # noqa: E402
from support.running.refusals import refuses  # noqa: E402

EXACT = exact_rows(PAGE.read_text())
REFUSED = refused_rows(PAGE.read_text())
# One of each mechanism: a VAE of videos in `make test`; latents in lists, texts by layer, packed
# latents with an image beside them in `make test-long`.
QUICK = ("QwenImagePipeline",)
LONG = (
    "ZImagePipeline",
    "HiDreamImagePipeline",
    "FluxKontextPipeline",
)
NAMES = [
    *QUICK,
    *(pytest.param(name, marks=pytest.mark.long) for name in LONG),
    *(
        pytest.param(name, marks=pytest.mark.extended("conformance"))
        for name in EXACT
        if name not in QUICK + LONG
    ),
]
KINDS = ("draw", "change", "fill")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return lambda name: picture_families.write(name, tmp_path_factory.mktemp(name) / "model")


def request(kind: str, multiple: int) -> PictureRequest:
    side = multiple * max(2, 16 // multiple)
    side = side if kind == "draw" else max(side, 64)  # Flux.2 reads no smaller image
    noise = np.random.default_rng(0).integers(0, 255, (side, side, 3), np.uint8)
    mask = np.zeros((side, side), np.uint8)
    mask[:, side // 2 :] = 255
    return PictureRequest(
        prompt="a red circle",
        width=side,
        height=side,
        steps=3,
        seed=5,
        guidance_scale=3.0,
        image=None if kind == "draw" else Image.fromarray(noise),
        mask=Image.fromarray(mask) if kind == "fill" else None,
        strength=None if kind == "draw" else 0.7,
    )


def reference(path: Path, drawing: PictureRequest, class_name: str) -> Pixels:
    """Return what diffusers' own call draws."""
    tokenizers = lone_tokenizers(path)
    parts = missing_parts(path) | processors(path) | dict.fromkeys(tokenizers)
    pipeline = read(functools.partial(DiffusionPipeline.from_pretrained, path, **parts))
    for part, tokenizer in tokenizers.items():
        setattr(pipeline, part, tokenizer)
    if type(pipeline).__name__ != class_name:
        pipeline = pipeline_class(class_name).from_pipe(pipeline)
    pipeline.set_progress_bar_config(disable=True)
    known = inspect.signature(pipeline.__call__).parameters
    has_cfg = "true_cfg_scale" in known and not getattr(
        pipeline.transformer.config, "guidance_embeds", False
    )
    given: dict[str, Any] = {
        "prompt": drawing.prompt,
        "width": drawing.width,
        "height": drawing.height,
        "num_inference_steps": drawing.steps,
        "generator": torch.Generator().manual_seed(drawing.seed),
        "output_type": "np",
        "image": drawing.image,
        "mask_image": drawing.mask,
        "strength": drawing.strength,
        "use_resolution_binning": False,
        "clean_caption": False,
        "max_area": drawing.width * drawing.height,
        "_auto_resize": False,
        "output_resolution": drawing.width,
        "use_kv_cache": False,
        "distilled_guidance_scale": drawing.guidance_scale,
        "true_cfg_scale" if has_cfg else "guidance_scale": drawing.guidance_scale,
        "negative_prompt": " " if has_cfg else None,
    }
    arguments = {key: value for key, value in given.items() if key in known and value is not None}
    if "intermediate_timesteps" in known:
        arguments["intermediate_timesteps"] = None
    if class_name.startswith("Kandinsky5"):  # which draws in one of these
        pipeline.resolutions = [(drawing.width, drawing.height)]
    if getattr(pipeline, "guider", None) is not None:
        pipeline.guider.guidance_scale = drawing.guidance_scale
    if class_name == "HiDreamImagePipeline":  # which draws every size with this one's area
        pipeline.default_sample_size = drawing.width / pipeline.vae_scale_factor
    images = pipeline(**arguments, return_dict=False)[0]
    pixels: Pixels = (images[0] * 255).round().astype(np.int64)
    return pixels


@pytest.mark.parametrize("name", NAMES)
def test_it_draws_changes_and_fills_what_diffusers_does(
    folder: Callable[[str], Path], name: str
) -> None:
    path = folder(name)
    with RecordingEngine(path) as recording:
        factory = recording.engine.factory
        assert [kind for kind in KINDS if kind in factory.rules.kinds] == EXACT[name].kinds
        for kind in EXACT[name].kinds:
            drawing = request(kind, factory.rules.size_multiple)
            class_name = type(factory.pipeline_of(kind)).__name__
            wanted = reference(path, drawing, class_name)
            assert wanted.std() > 2  # a picture, no surface
            passes = recording.engine.passes
            (alone,) = recording.draw(drawing)
            assert_alike(alone, wanted)
            passes, alone_passes = recording.engine.passes, recording.engine.passes - passes
            one, _, three = recording.draw_together(drawing, replace(drawing, seed=6), drawing)
            assert_alike(one, wanted)
            assert_alike(three, wanted)
            if EXACT[name].is_batched:
                assert recording.engine.passes - passes < 3 * alone_passes


def test_the_page_lists_every_pipeline_of_diffusers_once() -> None:
    assert not EXACT.keys() & REFUSED.keys()
    listed = EXACT.keys() | REFUSED.keys()
    assert listed == picture_classes().keys(), "run scripts/list_pictures.py"
    assert len(EXACT) >= 14


@pytest.mark.long
def test_relatives_are_looked_for_where_diffusers_may_have_one() -> None:
    relatives = {
        DRAW: auto_pipeline.AUTO_TEXT2IMAGE_PIPELINES_MAPPING,
        CHANGE: auto_pipeline.AUTO_IMAGE2IMAGE_PIPELINES_MAPPING,
        FILL: auto_pipeline.AUTO_INPAINT_PIPELINES_MAPPING,
    }
    for family in {family for mapping in relatives.values() for family in mapping}:
        own = {kind: mapping[family] for kind, mapping in relatives.items() if family in mapping}
        for one in own.values():
            missed = [
                other.__name__
                for kind, other in own.items()
                if other is not one and not may_have_relative(one.__name__, kind)
            ]
            assert not missed, one.__name__
    assert not may_have_relative("PixArtSigmaPipeline", CHANGE)
    assert not may_have_relative("PixArtSigmaPipeline", FILL)


def test_a_model_that_only_changes_pictures_or_only_whole_ones_says_so(
    folder: Callable[[str], Path],
) -> None:
    path = folder("SanaSprintImg2ImgPipeline")
    factory = PipelineFactory(EngineConfig(model=str(path)))
    with refuses(BadRequest, "image"):
        factory.rules.completed(PictureRequest(prompt="a"))
    image = Image.new("RGB", (64, 64))
    with refuses(UnsupportedParameter, "mask"):
        factory.rules.completed(PictureRequest(prompt="a", image=image, mask=image.convert("L")))


@pytest.mark.parametrize("name", ["StableDiffusion3Pipeline", "AuraFlowPipeline"])
def test_a_picture_beyond_the_positions_of_its_denoiser_is_refused(
    folder: Callable[[str], Path], name: str
) -> None:
    rules = PipelineFactory(EngineConfig(model=str(folder(name)))).rules
    side, one = rules.max_side, rules.size_multiple
    assert side == 32 * one
    assert rules.completed(PictureRequest(prompt="a", width=side, height=one)).width == side
    with refuses(BadRequest, "size"):
        rules.completed(PictureRequest(prompt="a", width=side + one, height=one))


def test_what_a_class_decides_is_refused_before_any_weights_are_read(tmp_path: Path) -> None:
    for name in REFUSED.keys() - picture_families.NAMES:
        (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
        with pytest.raises(ConfigError, match="is not supported"):
            PipelineFactory(EngineConfig(model=str(tmp_path)))


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(REFUSED.keys() & picture_families.NAMES))
def test_what_the_trial_finds_is_refused_when_it_is_loaded(
    folder: Callable[[str], Path], name: str
) -> None:
    with pytest.raises(ConfigError, match="is not supported"):
        PipelineFactory(EngineConfig(model=str(folder(name))))
