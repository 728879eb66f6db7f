"""Test that pipelines of videos make what diffusers makes, and that the others are refused."""

from __future__ import annotations

import functools
import inspect
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load, save

from motet_diffusion.config import EngineConfig
from motet_diffusion.engine.model_call import DENOISER
from motet_diffusion.engine.request import PictureRequest
from motet_diffusion.pipeline.pipeline_factory import PipelineFactory
from motet_diffusion.pipeline.quantized import QuantizedLinear
from motet_diffusion.pipeline.support import SECOND_DENOISER, is_video, pipeline_class
from motet_models.video_support import FAMILIES, makes_videos
from motet_shared.errors import BadRequest, ConfigError, PayloadTooLarge
from support.checkpoints import diffusion_checkpoints
from support.engine.recording_engine import Pixels, RecordingEngine, assert_alike
from support.families import newer_video_families, video_families
from support.running.refusals import refuses
from support.running.tiers import mostly_extended

# One of each mechanism: two denoisers; packed latents, and sound.
QUICK = ("WanPipeline 2.2", "LTX2Pipeline")
NAMES = mostly_extended(video_families.NAMES, QUICK, "families")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "videos.md"
SIDE, FRAMES = 64, 17
QUIET = 1e-4  # of sound, whose samples are within -1 to 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what writes the checkpoint of a name, each once."""
    return functools.cache(
        lambda name: video_families.write(name, tmp_path_factory.mktemp(name) / "model")
    )


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
    generator = torch.Generator().manual_seed(drawing.seed)
    if pipeline.scheduler.config.get("stochastic_sampling"):
        pipeline.scheduler.step = functools.partial(pipeline.scheduler.step, generator=generator)
    known = inspect.signature(pipeline.__call__).parameters
    given: dict[str, Any] = {
        "prompt": drawing.prompt,
        "width": drawing.width,
        "height": drawing.height,
        "num_frames": drawing.frames,
        "frame_rate": FAMILIES[class_name].frame_rate,
        "num_inference_steps": drawing.steps,
        "guidance_scale": drawing.guidance_scale,
        "generator": generator,
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


@pytest.mark.parametrize("name", NAMES)
def test_a_video_goes_on_from_a_checkpoint_with_the_same_frames(
    folder: Callable[[str], Path], name: str
) -> None:
    path = folder(name)
    kind = video_families.kinds_of(name)[0]
    drawing = replace(request(kind), checkpoint_every=1, previews=1)
    with RecordingEngine(path) as first:
        (whole,) = first.draw(drawing)
        heard = first.sound(0)
        (step,) = [event for event in first.steps(0) if event.step == 2]
        assert sum(event.estimate is not None for event in first.steps(0)) == 1
    with RecordingEngine(path) as second:
        (resumed,) = second.draw(replace(drawing, resume=step.checkpoint, resume_step=2))
        assert [event.step for event in second.steps(0)] == [3, 4]
        assert np.array_equal(second.sound(0), heard)
    assert np.array_equal(resumed, whole)


def test_noise_that_a_scheduler_adds_is_the_requests(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """`WanPipeline` passes its scheduler no generator: diffusers takes the process's noise."""
    path = shutil.copytree(folder("WanPipeline"), tmp_path / "model")
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, stochastic_sampling=True)
    scheduler.save_pretrained(path / "scheduler")
    index = json.loads((path / "model_index.json").read_text())
    index["scheduler"][1] = type(scheduler).__name__
    (path / "model_index.json").write_text(json.dumps(index))
    drawing = replace(request("draw"), checkpoint_every=1)
    wanted, _ = reference(path, drawing, "WanPipeline")
    with RecordingEngine(path) as first:
        (whole,) = first.draw(drawing)
        step = next(event for event in first.steps(0) if event.step == 2)
        again, other = first.draw_together(drawing, replace(drawing, seed=6))
    assert_alike(whole, wanted)
    assert_alike(again, wanted)
    assert not np.array_equal(whole, other)
    with RecordingEngine(path) as second:
        (resumed,) = second.draw(replace(drawing, resume=step.checkpoint, resume_step=2))
    assert np.array_equal(resumed, whole)


@pytest.mark.long
def test_a_checkpoint_without_sound_is_none_of_a_video_with_sound(
    folder: Callable[[str], Path],
) -> None:
    drawing = replace(request("draw"), checkpoint_every=1)
    with RecordingEngine(folder("LTX2Pipeline")) as recording:
        recording.draw(drawing)
        whole = load(next(event for event in recording.steps(0) if event.step == 2).checkpoint)
        assert {"latents", "sound.latents", "generator"} <= whole.keys()
        for stored in (None, torch.zeros(1, 2, 3)):
            tensors = {key: value for key, value in whole.items() if key != "sound.latents"}
            resume = save(tensors if stored is None else {**tensors, "sound.latents": stored})
            with refuses(BadRequest, "resume"):
                recording.draw(replace(drawing, resume=resume, resume_step=2))


@pytest.mark.parametrize(
    "name", ["WanPipeline", pytest.param("WanPipeline 2.2 TI2V", marks=pytest.mark.long)]
)
def test_frames_come_while_the_vae_decodes(folder: Callable[[str], Path], name: str) -> None:
    with RecordingEngine(folder(name)) as recording:
        recording.draw(request("draw"))
        assert [len(part) for part in recording.frames(0)] == [1, 4, 4, 4, 4]


@pytest.mark.long
def test_a_step_goes_to_the_denoiser_of_its_noise(folder: Callable[[str], Path]) -> None:
    """Wan 2.2: the first denoiser as long as there is much noise, then the second."""
    with RecordingEngine(folder("WanPipeline 2.2")) as recording:
        calls: list[str] = []
        for name, module in recording.engine.factory.denoisers.items():
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
        recording.draw(request("draw"))
    assert calls == [DENOISER] * 4 + [SECOND_DENOISER] * 4, "each with and without the prompt"


@pytest.mark.long
def test_what_is_for_one_denoiser_is_refused_with_two(folder: Callable[[str], Path]) -> None:
    path = str(folder("WanPipeline 2.2"))
    with pytest.raises(ConfigError, match=r"^loras="):
        PipelineFactory(EngineConfig(model=path, loras=("ink=ink.safetensors",)))
    factory = PipelineFactory(EngineConfig(model=path, quantization="int8"))
    assert len(factory.denoisers) == 2
    for denoiser in factory.denoisers.values():
        assert any(isinstance(module, QuantizedLinear) for module in denoiser.modules())


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        "LTX2Pipeline",
        "HunyuanVideoPipeline",
        "HunyuanVideo15Pipeline",
        "CogVideoXPipeline",
        "WanPipeline",
    ],
)
def test_blocks_that_a_step_cache_cannot_leave_out_are_refused(
    folder: Callable[[str], Path], name: str
) -> None:
    with pytest.raises(ConfigError, match=r"^step_cache="):
        RecordingEngine(folder(name), step_cache=0.1)


@pytest.mark.long
def test_a_video_of_an_image_has_its_shape_and_no_more_pixels_than_unasked(
    folder: Callable[[str], Path],
) -> None:
    def size(name: str, shape: tuple[int, int], width: int = 0, height: int = 0) -> tuple[int, int]:
        config = EngineConfig(model=str(folder(name)))
        image = Image.new("RGB", shape)
        drawing = PictureRequest(prompt="a", image=image, width=width, height=height)
        completed = PipelineFactory(config).rules.completed(drawing)
        return completed.width, completed.height

    assert size("WanImageToVideoPipeline", (4000, 3000)) == (720, 544)
    assert size("WanImageToVideoPipeline", (100, 70)) == (96, 64)
    assert size("HunyuanVideo15ImageToVideoPipeline", (4000, 3000)) == (64, 48)
    assert size("HunyuanVideo15ImageToVideoPipeline", (4000, 3000), 128, 96) == (128, 96)


def test_looking_for_a_relative_leaves_the_modules_their_type(
    folder: Callable[[str], Path],
) -> None:
    """diffusers' `from_pipe` casts modules, where its auto classes have no entry of a family."""
    config = EngineConfig(model=str(folder("LTXPipeline")), dtype="bfloat16")
    factory = PipelineFactory(config)
    assert {factory.denoiser.dtype, factory.vae.dtype} == {torch.bfloat16}
    assert type(factory.pipeline_of("change")) is diffusers.LTXImageToVideoPipeline


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


def test_ltx_2_has_a_length_unasked(folder: Callable[[str], Path]) -> None:
    rules = PipelineFactory(EngineConfig(model=str(folder("LTX2Pipeline")))).rules
    assert rules.completed(PictureRequest(prompt="a")).frames == 121


def test_a_folder_says_what_its_videos_are_unasked(
    folder: Callable[[str], Path], tmp_path: Path
) -> None:
    path = shutil.copytree(folder("WanPipeline"), tmp_path / "model")
    given = {"frame_rate": 4.5, "num_frames": 9, "width": 64, "height": 32}
    (path / "generation_config.json").write_text(json.dumps(given))
    rules = PipelineFactory(EngineConfig(model=str(path))).rules
    unasked = rules.completed(PictureRequest(prompt="a"))
    assert (unasked.frames, unasked.width, unasked.height) == (9, 64, 32)
    asked = rules.completed(PictureRequest(prompt="a", seconds=4, width=48, height=48))
    assert (asked.frames, asked.width, asked.height) == (17, 48, 48)
    rules.completed(PictureRequest(prompt="a", seconds=8, width=176, height=176))
    with refuses(PayloadTooLarge, "size"):  # 64 times the pixels of one unasked
        rules.completed(PictureRequest(prompt="a", seconds=8, width=192, height=192))


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


def _with_dpm_scheduler() -> Any:
    pipeline = video_families.cogvideox()
    pipeline.scheduler = diffusers.CogVideoXDPMScheduler.from_config(pipeline.scheduler.config)
    return pipeline


def _without_second_denoiser() -> Any:
    pipeline = newer_video_families.wan_2_2()
    pipeline.register_modules(transformer_2=None)
    return pipeline


def _with_hooks() -> Any:
    pipeline = newer_video_families.hunyuan_video_1_5()
    layers = diffusers.LayerSkipConfig(indices=[0], fqn="transformer_blocks")
    guider = diffusers.SkipLayerGuidance(skip_layer_config=layers, skip_layer_guidance_start=0)
    pipeline.register_modules(guider=guider)
    return pipeline


@pytest.mark.long(after=1)
@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (_with_dpm_scheduler, "CogVideoXDPMScheduler"),
        (_without_second_denoiser, "boundary_ratio"),
        (newer_video_families.wan_flf2v, "pos_embed_seq_len"),
        (_with_hooks, "SkipLayerGuidance"),
    ],
)
def test_what_a_loop_of_videos_cannot_do_is_refused(
    tmp_path: Path, make: Callable[[], Any], cause: str
) -> None:
    torch.manual_seed(0)
    make().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"is not supported.*{cause}"):
        PipelineFactory(EngineConfig(model=str(tmp_path)))
