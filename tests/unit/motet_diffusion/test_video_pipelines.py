"""Test that pipelines of videos make what diffusers makes, and that the others are refused."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from numpy.typing import NDArray
from PIL import Image

from motet_diffusion.config import EngineConfig
from motet_diffusion.engine.request import PictureRequest
from motet_diffusion.pipeline.pipeline_factory import PipelineFactory
from motet_diffusion.pipeline.support import is_video, pipeline_class
from motet_models.video_support import FAMILIES, makes_videos
from motet_shared.errors import BadRequest, ConfigError, PayloadTooLarge
from support.checkpoints import diffusion_checkpoints
from support.engine.recording_engine import Pixels, RecordingEngine, assert_alike
from support.families import video_families
from support.running.refusals import refuses

QUICK = ("WanPipeline", "LTXPipeline")
NAMES = [
    *QUICK,
    *(
        pytest.param(name, marks=pytest.mark.long)
        for name in video_families.NAMES
        if name not in QUICK
    ),
]
PAGE = Path(__file__).resolve().parents[3] / "docs" / "videos.md"
SIDE, FRAMES = 64, 17
QUIET = 1e-4  # of sound, whose samples are within -1 to 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return lambda name: video_families.write(name, tmp_path_factory.mktemp(name) / "model")


def request(kind: str) -> PictureRequest:
    noise = np.random.default_rng(0).integers(0, 255, (SIDE, SIDE, 3), np.uint8)
    return PictureRequest(
        prompt="a red circle",
        width=SIDE,
        height=SIDE,
        frames=FRAMES,
        steps=4,
        seed=5,
        guidance_scale=3.0,
        image=None if kind == "draw" else Image.fromarray(noise),
    )


def reference(
    path: Path, drawing: PictureRequest, class_name: str
) -> tuple[Pixels, NDArray[np.float32] | None]:
    """Return the frames of diffusers' own call, and the sound of those that have it."""
    pipeline = DiffusionPipeline.from_pretrained(path)
    if type(pipeline).__name__ != class_name:
        pipeline = pipeline_class(class_name).from_pipe(pipeline)
    pipeline.set_progress_bar_config(disable=True)
    if getattr(pipeline, "guider", None) is not None:
        pipeline.guider.guidance_scale = drawing.guidance_scale
    known = inspect.signature(pipeline.__call__).parameters
    given: dict[str, Any] = {
        "prompt": drawing.prompt,
        "width": drawing.width,
        "height": drawing.height,
        "num_frames": drawing.frames,
        "frame_rate": FAMILIES[class_name].frame_rate,
        "num_inference_steps": drawing.steps,
        "guidance_scale": drawing.guidance_scale,
        "generator": torch.Generator().manual_seed(drawing.seed),
        "output_type": "np",
        "image": drawing.image,
    }
    arguments = {key: value for key, value in given.items() if key in known and value is not None}
    outputs = pipeline(**arguments, return_dict=False)
    pixels: Pixels = (outputs[0][0] * 255).round().astype(np.int64)
    return pixels, outputs[1][0].float().numpy() if len(outputs) > 1 else None


@pytest.mark.parametrize("name", NAMES)
def test_frames_equal_those_of_diffusers(folder: Callable[[str], Path], name: str) -> None:
    path = folder(name)
    with RecordingEngine(path) as recording:
        factory = recording.engine.factory
        assert sorted(factory.rules.kinds) == sorted(video_families.kinds_of(name))
        assert factory.merges
        for kind in factory.rules.kinds:
            drawing = request(kind)
            wanted, sound = reference(path, drawing, type(factory.pipeline_of(kind)).__name__)
            assert wanted.shape == (FRAMES, SIDE, SIDE, 3)
            assert wanted.std() > 2
            passes = recording.engine.passes
            (alone,) = recording.draw(drawing)
            assert_alike(alone, wanted)
            heard = recording.sound(0)
            assert (heard is None) == (sound is None) == (not factory.rules.sound_rate)
            if heard is not None and sound is not None:
                assert heard.shape == sound.shape
                assert sound.std() > QUIET
                np.testing.assert_allclose(heard, sound, atol=QUIET)
            passes, alone_passes = recording.engine.passes, recording.engine.passes - passes
            one, other, three = recording.draw_together(drawing, replace(drawing, seed=6), drawing)
            assert_alike(one, wanted)
            assert_alike(three, wanted)
            assert not np.array_equal(other, wanted)
            assert recording.engine.passes - passes < 3 * alone_passes


@pytest.mark.parametrize("name", QUICK)
def test_a_video_goes_on_from_a_checkpoint_with_the_same_frames(
    folder: Callable[[str], Path], name: str
) -> None:
    path = folder(name)
    drawing = replace(request("draw"), checkpoint_every=1, previews=1)
    with RecordingEngine(path) as first:
        (whole,) = first.draw(drawing)
        (step,) = [event for event in first.steps(0) if event.step == 2]
        assert sum(event.estimate is not None for event in first.steps(0)) == 1
    with RecordingEngine(path) as second:
        (resumed,) = second.draw(replace(drawing, resume=step.checkpoint, resume_step=2))
        assert [event.step for event in second.steps(0)] == [3, 4]
    assert np.array_equal(resumed, whole)


def test_frames_come_while_the_vae_decodes(folder: Callable[[str], Path]) -> None:
    with RecordingEngine(folder("WanPipeline")) as recording:
        recording.draw(request("draw"))
        assert [len(part) for part in recording.frames(0)] == [1, 4, 4, 4, 4]


def test_a_length_in_seconds_is_that_of_the_nearest_frames(folder: Callable[[str], Path]) -> None:
    rules = PipelineFactory(EngineConfig(model=str(folder("WanPipeline")), max_frames=81)).rules
    assert rules.frame_rate == 16
    assert rules.completed(PictureRequest(prompt="a")).frames == 81
    assert rules.completed(PictureRequest(prompt="a", seconds=2)).frames == 33
    assert rules.completed(PictureRequest(prompt="a", seconds=0.01)).frames == 5
    for seconds in (-1.0, float("nan"), float("inf")):
        with refuses(BadRequest, "seconds"):
            rules.completed(PictureRequest(prompt="a", seconds=seconds))
    with refuses(PayloadTooLarge, "seconds"):
        rules.completed(PictureRequest(prompt="a", seconds=5.2))


def test_a_folder_says_what_its_videos_are_unasked(folder: Callable[[str], Path]) -> None:
    path = folder("WanPipeline")
    given = {"frame_rate": 4.5, "num_frames": 9, "width": 64, "height": 32}
    (path / "generation_config.json").write_text(json.dumps(given))
    rules = PipelineFactory(EngineConfig(model=str(path))).rules
    unasked = rules.completed(PictureRequest(prompt="a"))
    assert (unasked.frames, unasked.width, unasked.height) == (9, 64, 32)
    asked = rules.completed(PictureRequest(prompt="a", seconds=4, width=48, height=48))
    assert (asked.frames, asked.width, asked.height) == (17, 48, 48)


def test_a_model_of_pictures_has_no_seconds(tmp_path: Path) -> None:
    path = diffusion_checkpoints.stable_diffusion(tmp_path / "model")
    rules = PipelineFactory(EngineConfig(model=str(path))).rules
    assert not rules.is_video
    with refuses(BadRequest, "seconds"):
        rules.completed(PictureRequest(prompt="a", seconds=1))


def test_other_pipelines_of_videos_are_refused_by_their_class(tmp_path: Path) -> None:
    found = {name for name in dir(diffusers) if (kind := pipeline_class(name)) and is_video(kind)}
    assert FAMILIES.keys() == {video_families.class_of(name) for name in video_families.NAMES}
    for name in FAMILIES:
        (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
        assert makes_videos(tmp_path)
    assert all(name in PAGE.read_text() for name in FAMILIES)
    assert len(found - FAMILIES.keys()) > 20
    for name in found - FAMILIES.keys():
        (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name}))
        assert not makes_videos(tmp_path)
        with pytest.raises(ConfigError, match=f"{name} is not supported"):
            PipelineFactory(EngineConfig(model=str(tmp_path)))


@pytest.mark.parametrize("change", ["second denoiser", "scheduler"])
def test_what_a_loop_of_videos_cannot_do_is_refused(tmp_path: Path, change: str) -> None:
    torch.manual_seed(0)
    if change == "scheduler":
        pipeline = video_families.cogvideox()
        pipeline.scheduler = diffusers.CogVideoXDPMScheduler.from_config(pipeline.scheduler.config)
    else:
        pipeline = video_families.wan()
        pipeline.register_modules(transformer_2=video_families.wan().transformer)
    pipeline.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is not supported"):
        PipelineFactory(EngineConfig(model=str(tmp_path)))
