"""ControlNets, IP-Adapters and schedulers per picture: what diffusers draws with them, in any company."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from motet_diffusion.engine.request import Control, ImagePrompt, Lora, PictureRequest
from motet_diffusion.pipeline.conditions import steps_from
from motet_diffusion.pipeline.schedulers import make_scheduler, names_for
from motet_shared.errors import BadRequest, ConfigError
from support.checkpoints.condition_checkpoints import write_controlnet, write_ip_adapter
from support.checkpoints.diffusion_checkpoints import FAMILIES, SIZE, flux, load, write_adapter
from support.engine.recording_engine import Pixels, RecordingEngine, assert_alike
from support.families.tiny_parts import deep_vae
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
    guidance: dict[str, Any] = {"guidance_scale": drawing.guidance_scale}
    if is_guided_by_hand(pipeline):
        guidance = {"true_cfg_scale": drawing.guidance_scale, "negative_prompt": " "}
    given: dict[str, Any] = {
        "prompt": drawing.prompt,
        "width": drawing.width,
        "height": drawing.height,
        "num_inference_steps": drawing.steps,
        "generator": torch.Generator().manual_seed(drawing.seed),
        "output_type": "np",
        **guidance,
        **arguments,
    }
    torch.manual_seed(drawing.seed)  # SD3's ControlNets read latents that are sampled with it
    images = pipeline(**given).images
    pixels: Pixels = (images[0] * 255).round().astype(np.int64)
    return pixels


def is_guided_by_hand(pipeline: Any) -> bool:
    """Return True for Flux without guidance in its weights."""
    known = inspect.signature(pipeline.__call__).parameters
    return "true_cfg_scale" in known and not pipeline.transformer.config.guidance_embeds


def flux_schnell(path: Path) -> Path:
    return flux(path, is_distilled=False)


# What changes and fills pictures is named where diffusers' auto classes do not find it.
WRITERS = {**FAMILIES, "schnell": flux_schnell}
CONTROLLED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "sd": (
        diffusers.ControlNetModel,
        (
            diffusers.StableDiffusionControlNetPipeline,
            diffusers.StableDiffusionControlNetImg2ImgPipeline,
            diffusers.StableDiffusionControlNetInpaintPipeline,
        ),
    ),
    "sdxl": (
        diffusers.ControlNetModel,
        (
            diffusers.StableDiffusionXLControlNetPipeline,
            diffusers.StableDiffusionXLControlNetImg2ImgPipeline,
            diffusers.StableDiffusionXLControlNetInpaintPipeline,
        ),
    ),
    "flux": (
        diffusers.FluxControlNetModel,
        (
            diffusers.FluxControlNetPipeline,
            diffusers.FluxControlNetImg2ImgPipeline,
            diffusers.FluxControlNetInpaintPipeline,
        ),
    ),
    "schnell": (diffusers.FluxControlNetModel, (diffusers.FluxControlNetPipeline,)),
    "sd3": (diffusers.SD3ControlNetModel, (diffusers.StableDiffusion3ControlNetPipeline,)),
}


def with_controlnets(
    family: str, model: Path, nets: dict[str, Path], drawing: PictureRequest
) -> Pixels:
    """What diffusers' own ControlNet pipelines draw."""
    network, pipelines = CONTROLLED[family]
    kind = pipelines[(drawing.image is not None) + (drawing.mask is not None)]
    controls = [
        network.from_pretrained(nets[one.name], low_cpu_mem_usage=False) for one in drawing.controls
    ]
    images = [one.image for one in drawing.controls]
    is_plain = family.startswith("sd") and family != "sd3" and drawing.image is None
    field = "image" if is_plain else "control_image"
    arguments: dict[str, Any] = {
        field: images,
        "controlnet_conditioning_scale": [one.scale for one in drawing.controls],
        "control_guidance_start": [one.start for one in drawing.controls],
        "control_guidance_end": [one.end for one in drawing.controls],
    }
    if len(controls) == 1:  # several of Flux' need modes as soon as they change a picture
        arguments = {name: value[0] for name, value in arguments.items()}
    if drawing.image is not None:
        arguments |= {"image": drawing.image, "strength": drawing.strength}
    if drawing.mask is not None:
        arguments |= {"mask_image": drawing.mask}
    pipeline = kind.from_pipe(
        load(model), controlnet=controls[0] if len(controls) == 1 else controls
    )
    return drawn_by(pipeline, drawing, **arguments)


@pytest.mark.parametrize(
    "family",
    [
        "sd",
        "flux",
        *(
            pytest.param(one, marks=pytest.mark.extended("families"))
            for one in ("sdxl", "sd3", "schnell")
        ),
    ],
)
def test_pictures_with_different_controlnets_share_passes(family: str, tmp_path: Path) -> None:
    model = WRITERS[family](tmp_path / family / "model")
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
    if len(CONTROLLED[family][1]) == 1:  # diffusers has no pipeline that changes pictures with them
        drawings = drawings[:4]
    wanted = [drawn_by(load(model), RED)]
    wanted += [with_controlnets(family, model, nets, drawing) for drawing in drawings[1:]]
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("flux", {"conditioning_embedding_channels": 4, "patch_size": 2, "num_layers": 2}),
        ("flux", {"num_single_layers": 0, "guidance_embeds": False}),
        (
            "sd3",
            {"use_pos_embed": False, "num_layers": 1, "force_zeros_for_pooled_projection": False},
        ),
        ("sd3", {"joint_attention_dim": None, "num_layers": 3}),
    ],
)
def test_controlnets_of_every_layout_steer(
    family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    """Flux' that read pixels, SD3.5's that read no text: their depth is not that of the denoiser."""
    model = WRITERS[family](tmp_path / family / "model")
    drawing = RED
    if "conditioning_embedding_channels" in fields:  # what reads pixels divides them by 8
        deep_vae(shift_factor=0.06).save_pretrained(model / "vae")
        drawing = replace(RED, width=2 * SIZE, height=2 * SIZE)
    nets = {"a": write_controlnet(model, tmp_path / "a", 0, **fields)}
    nets["b"] = write_controlnet(model, tmp_path / "b", 1)
    drawings = [replace(drawing, controls=(Control(name, noise(1)),)) for name in "ab"]
    wanted = [with_controlnets(family, model, nets, drawing) for drawing in drawings]
    given = tuple(f"{name}={path}" for name, path in nets.items())
    with RecordingEngine(model, controlnets=given) as recording:
        for drawn, picture in zip(recording.draw_together(*drawings), wanted, strict=True):
            assert_alike(drawn, picture)


def load_adapters(pipeline: Any, folder: Path, files: list[Path], scales: list[float]) -> None:
    """Load IP-Adapters into a pipeline of diffusers; that of SD3 takes one only."""
    encoder = str(folder / "image_encoder")
    name = type(pipeline).__name__
    options: dict[str, Any] = {"weight_name": [file.name for file in files]}
    if name.startswith("Flux"):
        options |= {
            "image_encoder_pretrained_model_name_or_path": encoder,
            "image_encoder_dtype": torch.float32,
        }
    elif name.startswith("StableDiffusion3"):
        options = {"weight_name": files[0].name, "image_encoder_folder": encoder}
    pipeline.load_ip_adapter(str(folder), subfolder="", low_cpu_mem_usage=False, **options)
    pipeline.set_ip_adapter_scale(scales[0] if len(scales) == 1 else scales)


@pytest.mark.parametrize(
    "family",
    [
        "sd",
        "flux",
        *(
            pytest.param(one, marks=pytest.mark.extended("families"))
            for one in ("sdxl", "sd3", "schnell")
        ),
    ],
)
def test_pictures_with_different_image_prompts_share_passes(family: str, tmp_path: Path) -> None:
    model = WRITERS[family](tmp_path / family / "model")
    files = {
        name: write_ip_adapter(model, tmp_path / "ip", name, seed)
        for seed, name in enumerate(("style", "face"))
    }
    ink = write_adapter(model, tmp_path / "ink.safetensors", 1)
    drawings = [
        RED,
        replace(RED, image_prompts=(ImagePrompt("style", noise(1, 40)),)),
        replace(RED, guidance_scale=1.0, image_prompts=(ImagePrompt("style", noise(2, 40), 0.5),)),
        replace(RED, loras=(Lora("ink"),), image_prompts=(ImagePrompt("face", noise(2, 40)),)),
    ]
    if family != "sd3":
        two = (ImagePrompt("style", noise(1, 40), 0.6), ImagePrompt("face", noise(2, 40), 0.3))
        drawings.append(replace(RED, image_prompts=two))
    wanted = []
    for drawing in drawings:
        pipeline, arguments = load(model), dict[str, Any]()
        if used := drawing.image_prompts:
            adapters = [files[one.name] for one in used]
            load_adapters(pipeline, tmp_path / "ip", adapters, [one.scale for one in used])
            images = [one.image for one in used]
            arguments["ip_adapter_image"] = images[0] if family == "sd3" else images
        if drawing.loras:
            pipeline.load_lora_weights(
                str(ink.parent), weight_name=ink.name, low_cpu_mem_usage=False
            )
        wanted.append(drawn_by(pipeline, drawing, **arguments))
    assert min(np.abs(a - b).max() for i, a in enumerate(wanted) for b in wanted[:i]) > 5
    given = tuple(f"{name}={path}" for name, path in files.items())
    with RecordingEngine(model, ip_adapters=given, loras=(f"ink={ink}",)) as recording:
        alone = 0
        for drawing, picture in zip(drawings, wanted, strict=True):
            passes = recording.engine.passes
            assert_alike(recording.draw(drawing)[0], picture)
            alone += recording.engine.passes - passes
        passes = recording.engine.passes
        for drawn, picture in zip(recording.draw_together(*drawings), wanted, strict=True):
            assert_alike(drawn, picture)
        assert recording.engine.passes - passes < alone


@pytest.mark.long
@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_the_step_cache_keeps_what_each_row_is_drawn_with(family: str, tmp_path: Path) -> None:
    """A threshold that no row stays below skips nothing; a high one skips rows of some pictures."""
    model = WRITERS[family](tmp_path / family / "model")
    style = write_ip_adapter(model, tmp_path / "ip", "style", 0)
    net = write_controlnet(model, tmp_path / "a", 0)
    given: dict[str, Any] = {"ip_adapters": (f"style={style}",), "controlnets": (f"a={net}",)}
    drawings = [
        replace(RED, steps=6),
        replace(RED, steps=6, image_prompts=(ImagePrompt("style", noise(1, 40)),)),
        replace(RED, steps=6, controls=(Control("a", noise(1)),)),
    ]
    with RecordingEngine(model, **given) as recording:
        exact = [recording.draw(drawing)[0] for drawing in drawings]
    with RecordingEngine(model, step_cache=1e-9, **given) as recording:
        for drawn, picture in zip(recording.draw_together(*drawings), exact, strict=True):
            assert_alike(drawn, picture)
    with RecordingEngine(model, step_cache=0.5, **given) as recording:
        cached = [recording.draw(drawing)[0] for drawing in drawings]
        for drawn, picture in zip(recording.draw_together(*drawings), cached, strict=True):
            assert_alike(drawn, picture)
        assert recording.engine.cache is not None
        assert recording.engine.cache.skipped
        assert recording.engine.cache.computed


def schedulers() -> list[Any]:
    """Return all names of the families of models, most of them for `make extended PART=families`."""
    quick = {("sd", "k_dpmpp_2m_sde"), ("sd3", "dpmpp_2m")}
    families = {"sd": diffusers.DDIMScheduler(), "sd3": diffusers.FlowMatchEulerDiscreteScheduler()}
    return [
        pytest.param(
            family,
            name,
            marks=() if (family, name) in quick else pytest.mark.extended("families"),
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
    pixart = FAMILIES["pixart"](tmp_path / "pixart" / "model")
    with refuses(ConfigError, "controlnets"):
        RecordingEngine(pixart, controlnets=(f"a={net}",))
    with refuses(ConfigError, "ip_adapters"):
        RecordingEngine(pixart, ip_adapters=(f"a={style}",))


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("flux", {"num_mode": 2}),
        ("flux", {"in_channels": 32}),
        ("schnell", {"guidance_embeds": True}),
        ("sd3", {"extra_conditioning_channels": 1}),
        ("sd3", {"joint_attention_dim": 8}),
    ],
)
def test_controlnets_that_do_not_fit_are_refused(
    family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    model = WRITERS[family](tmp_path / family / "model")
    net = write_controlnet(model, tmp_path / "net", 0, **fields)
    with refuses(ConfigError, "controlnets"):
        RecordingEngine(model, controlnets=(f"a={net}",))
    with refuses(ConfigError, "controlnets"):  # of another family
        RecordingEngine(FAMILIES["sd"](tmp_path / "sd"), controlnets=(f"a={net}",))


@pytest.mark.long
def test_a_controlnet_that_only_draws_is_refused_for_other_pictures(tmp_path: Path) -> None:
    """Kontext's transformer also gets the tokens of the image, which no ControlNet reads."""
    model = FAMILIES["flux"](tmp_path / "model")
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(
        json.dumps({**index, "_class_name": "FluxKontextPipeline"})
    )
    net = write_controlnet(model, tmp_path / "net", 0)
    with RecordingEngine(model, controlnets=(f"a={net}",)) as recording:
        drawing = replace(RED, controls=(Control("a", noise(1)),))
        assert recording.draw(drawing)
        with refuses(BadRequest, "controlnets[0].name"):
            recording.engine.add("x", replace(drawing, image=noise(2), strength=1.0))


@pytest.mark.parametrize("begin_index", [None, 0, 4])
@pytest.mark.parametrize("done", [0, 2])
def test_the_steps_of_a_loop_are_the_same_in_its_middle(begin_index: int | None, done: int) -> None:
    """A picture that moves counts them when some are done."""
    times = torch.arange(20, 0, -1)
    first = begin_index or 0
    scheduler = SimpleNamespace(timesteps=times, begin_index=begin_index)
    assert steps_from(scheduler, times[first + done], done) == 20 - first
