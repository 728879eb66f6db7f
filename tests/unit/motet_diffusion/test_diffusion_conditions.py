"""ControlNets, IP-Adapters and schedulers per picture: what diffusers draws with them, in any company."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from motet_diffusion.engine.request import Control, ImagePrompt, Lora, PictureRequest
from motet_diffusion.pipeline.schedulers import make_scheduler, names_for
from motet_shared.errors import BadRequest, ConfigError
from support.checkpoints.condition_checkpoints import write_controlnet, write_ip_adapter
from support.checkpoints.diffusion_checkpoints import FAMILIES, SIZE, load, write_adapter
from support.engine.recording_engine import Pixels, RecordingEngine, assert_alike
from support.running.refusals import refuses

RED = PictureRequest(
    prompt="red circle", steps=3, seed=3, width=SIZE, height=SIZE, guidance_scale=3.0
)


def noise(seed: int, size: int = SIZE) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 255, (size, size, 3), np.uint8)
    return Image.fromarray(values)


def half() -> Image.Image:
    mask = np.zeros((SIZE, SIZE), np.uint8)
    mask[:, SIZE // 2 :] = 255
    return Image.fromarray(mask)


def drawn_by(pipeline: Any, drawing: PictureRequest, **arguments: Any) -> Pixels:
    """What a pipeline of diffusers draws."""
    pipeline.set_progress_bar_config(disable=True)
    given: dict[str, Any] = {
        "prompt": drawing.prompt,
        "width": SIZE,
        "height": SIZE,
        "num_inference_steps": drawing.steps,
        "guidance_scale": drawing.guidance_scale,
        "generator": torch.Generator().manual_seed(drawing.seed),
        "output_type": "np",
        **arguments,
    }
    images = pipeline(**given).images
    pixels: Pixels = (images[0] * 255).round().astype(np.int64)
    return pixels


def auto_class(drawing: PictureRequest) -> Any:
    if drawing.mask is not None:
        return diffusers.AutoPipelineForInpainting
    if drawing.image is not None:
        return diffusers.AutoPipelineForImage2Image
    return diffusers.AutoPipelineForText2Image


def with_controlnets(model: Path, nets: dict[str, Path], drawing: PictureRequest) -> Pixels:
    """What diffusers' own ControlNet pipelines draw."""
    controls = [
        diffusers.ControlNetModel.from_pretrained(nets[one.name], low_cpu_mem_usage=False)
        for one in drawing.controls
    ]
    pipeline = auto_class(drawing).from_pipe(load(model), controlnet=controls)
    images = [one.image for one in drawing.controls]
    field = "image" if drawing.image is None else "control_image"
    arguments: dict[str, Any] = {
        field: images,
        "controlnet_conditioning_scale": [one.scale for one in drawing.controls],
        "control_guidance_start": [one.start for one in drawing.controls],
        "control_guidance_end": [one.end for one in drawing.controls],
    }
    if drawing.image is not None:
        arguments |= {"image": drawing.image, "strength": drawing.strength}
    if drawing.mask is not None:
        arguments |= {"mask_image": drawing.mask}
    return drawn_by(pipeline, drawing, **arguments)


@pytest.mark.parametrize("family", ["sd", pytest.param("sdxl", marks=pytest.mark.long)])
def test_pictures_with_different_controlnets_share_passes(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family](tmp_path / family / "model")
    nets = {name: write_controlnet(model, tmp_path / name, seed) for seed, name in enumerate("ab")}
    image = noise(9)
    drawings = [
        RED,
        replace(RED, controls=(Control("a", noise(1)),)),
        replace(RED, controls=(Control("a", noise(2), 0.7), Control("b", noise(1), 0.4))),
        replace(RED, steps=4, controls=(Control("b", noise(2), 1.0, 0.2, 0.8),)),
        replace(RED, steps=5, image=image, strength=0.7, controls=(Control("a", noise(1)),)),
        replace(
            RED, steps=5, image=image, mask=half(), strength=0.9, controls=(Control("b", noise(1)),)
        ),
    ]
    wanted = [drawn_by(load(model), RED)]
    wanted += [with_controlnets(model, nets, drawing) for drawing in drawings[1:]]
    assert min(np.abs(a - b).max() for i, a in enumerate(wanted) for b in wanted[:i]) > 5
    given = tuple(f"{name}={path}" for name, path in nets.items())
    with RecordingEngine(model, controlnets=given) as recording:
        alone = 0
        for drawing, picture in zip(drawings, wanted, strict=True):
            passes = recording.engine.passes
            (drawn,) = recording.draw(drawing)
            assert_alike(drawn, picture)
            alone += recording.engine.passes - passes
        passes = recording.engine.passes
        for drawn, picture in zip(recording.draw_together(*drawings), wanted, strict=True):
            assert_alike(drawn, picture)
        assert recording.engine.passes - passes < alone


@pytest.mark.parametrize("family", ["sd", pytest.param("sdxl", marks=pytest.mark.long)])
def test_pictures_with_different_image_prompts_share_passes(family: str, tmp_path: Path) -> None:
    model = FAMILIES[family](tmp_path / family / "model")
    files = {
        name: write_ip_adapter(model, tmp_path / "ip", name, seed)
        for seed, name in enumerate(("style", "face"))
    }
    ink = write_adapter(model, tmp_path / "ink.safetensors", 1)
    drawings = [
        RED,
        replace(RED, image_prompts=(ImagePrompt("style", noise(1, 40)),)),
        replace(RED, guidance_scale=1.0, image_prompts=(ImagePrompt("style", noise(2, 40), 0.5),)),
        replace(
            RED,
            image_prompts=(
                ImagePrompt("style", noise(1, 40), 0.6),
                ImagePrompt("face", noise(2, 40), 0.3),
            ),
        ),
        replace(RED, loras=(Lora("ink"),), image_prompts=(ImagePrompt("face", noise(2, 40)),)),
    ]
    wanted = []
    for drawing in drawings:
        pipeline, arguments = load(model), dict[str, Any]()
        if drawing.image_prompts:
            pipeline.load_ip_adapter(
                str(tmp_path / "ip"),
                subfolder="",
                weight_name=[files[one.name].name for one in drawing.image_prompts],
                low_cpu_mem_usage=False,
            )
            pipeline.set_ip_adapter_scale([one.scale for one in drawing.image_prompts])
            arguments["ip_adapter_image"] = [one.image for one in drawing.image_prompts]
        if drawing.loras:
            pipeline.load_lora_weights(
                str(ink.parent), weight_name=ink.name, low_cpu_mem_usage=False
            )
        wanted.append(drawn_by(pipeline, drawing, **arguments))
    assert min(np.abs(a - b).max() for i, a in enumerate(wanted) for b in wanted[:i]) > 5
    given = tuple(f"{name}={path}" for name, path in files.items())
    with RecordingEngine(model, ip_adapters=given, loras=(f"ink={ink}",)) as recording:
        for drawing, picture in zip(drawings, wanted, strict=True):
            assert_alike(recording.draw(drawing)[0], picture)
        passes = recording.engine.passes
        for drawn, picture in zip(recording.draw_together(*drawings), wanted, strict=True):
            assert_alike(drawn, picture)
        assert recording.engine.passes - passes < len(drawings) * RED.steps


def schedulers() -> list[Any]:
    """Return all names of the families of models, most of them for `make test-long`."""
    quick = {("sd", "k_dpmpp_2m_sde"), ("sd3", "dpmpp_2m")}
    families = {"sd": diffusers.DDIMScheduler(), "sd3": diffusers.FlowMatchEulerDiscreteScheduler()}
    return [
        pytest.param(
            family,
            name,
            marks=() if (family, name) in quick else pytest.mark.long,
            id=f"{family}-{name}",
        )
        for family, own in families.items()
        for name in names_for(own)
    ]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, tuple[Path, RecordingEngine]] = {}

    def engine_of(family: str) -> tuple[Path, RecordingEngine]:
        if family not in made:
            path = FAMILIES[family](tmp_path_factory.mktemp(family) / "model")
            made[family] = path, RecordingEngine(path)
        return made[family]

    yield engine_of
    for _, recording in made.values():
        recording.engine.close()


@pytest.mark.parametrize(("family", "name"), schedulers())
def test_a_picture_has_the_scheduler_that_it_names(
    engines: Callable[[str], tuple[Path, RecordingEngine]], family: str, name: str
) -> None:
    path, recording = engines(family)
    drawing = replace(RED, steps=5, scheduler=name)
    pipeline = load(path)
    pipeline.scheduler = make_scheduler(name, pipeline.scheduler)
    wanted = drawn_by(pipeline, drawing)
    assert_alike(recording.draw(drawing)[0], wanted)
    together, *_ = recording.draw_together(drawing, replace(RED, steps=5), replace(drawing, seed=4))
    assert_alike(together, wanted)


@pytest.mark.long
def test_a_scheduler_that_a_loop_does_not_run_with_is_refused_by_name(
    engines: Callable[[str], tuple[Path, RecordingEngine]],
) -> None:
    _, recording = engines("sd3")
    with refuses(BadRequest, "scheduler"):
        recording.engine.add("x", replace(RED, scheduler="pndm"))  # of no flow model
    changed = replace(RED, image=noise(1), strength=1.0, scheduler="unipc")
    with refuses(BadRequest, "scheduler"):
        recording.draw(changed)  # which adds no noise as this loop needs it
    assert recording.draw(replace(changed, scheduler="euler"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"controls": (Control("b", noise(1)),)}, "controlnets[0].name"),
        ({"controls": (Control("a", noise(1), float("nan")),)}, "controlnets[0].scale"),
        ({"controls": (Control("a", noise(1), 11),)}, "controlnets[0].scale"),
        ({"controls": (Control("a", noise(1), 1, 0.5, 0.5),)}, "controlnets[0].end"),
        ({"controls": (Control("a", noise(1), 1, 0, float("nan")),)}, "controlnets[0].end"),
        ({"controls": (Control("a", noise(1)),) * 5}, "controlnets"),
        ({"image_prompts": (ImagePrompt("a", noise(1)),)}, "ip_adapters[0].name"),
        (
            {"image_prompts": (ImagePrompt("style", noise(1), float("inf")),)},
            "ip_adapters[0].scale",
        ),
        ({"image_prompts": (ImagePrompt("style", noise(1)),) * 5}, "ip_adapters"),
        ({"scheduler": "x" * 100}, "scheduler"),
    ],
)
def test_conditions_that_cannot_be_had_are_named(
    conditioned: RecordingEngine, fields: dict[str, Any], param: str
) -> None:
    with refuses(BadRequest, param):
        conditioned.engine.add("x", replace(RED, **fields))


@pytest.fixture(scope="module")
def conditioned(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("conditioned")
    model = FAMILIES["sd"](folder / "model")
    net = write_controlnet(model, folder / "net", 0)
    style = write_ip_adapter(model, folder / "ip", "style", 0)
    with RecordingEngine(model, controlnets=(f"a={net}",), ip_adapters=(f"style={style}",)) as made:
        yield made


def test_folders_that_are_no_conditions_of_a_model_are_refused(tmp_path: Path) -> None:
    model = FAMILIES["sd"](tmp_path / "model")
    other = FAMILIES["sdxl"](tmp_path / "sdxl" / "model")
    net = write_controlnet(other, tmp_path / "net", 0)
    style = write_ip_adapter(other, tmp_path / "ip", "style", 0)
    for setting in ("a", f"a={tmp_path / 'none'}", f"a={net}", f"a={model / 'unet'}"):
        with refuses(ConfigError, "controlnets"):
            RecordingEngine(model, controlnets=(setting,))
    for setting in ("a", f"a={tmp_path / 'none'}", f"a={style}"):
        with refuses(ConfigError, "ip_adapters"):
            RecordingEngine(model, ip_adapters=(setting,))
    flux = FAMILIES["flux"](tmp_path / "flux" / "model")
    with refuses(ConfigError, "controlnets"):
        RecordingEngine(flux, controlnets=(f"a={net}",))
    with refuses(ConfigError, "ip_adapters"):
        RecordingEngine(flux, ip_adapters=(f"a={style}",))
