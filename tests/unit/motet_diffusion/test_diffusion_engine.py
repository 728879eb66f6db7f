"""The diffusion engine draws diffusers' pictures: alone, in company, changed, taken up again, come who may."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoPipelineForImage2Image, AutoPipelineForInpainting, DiffusionPipeline
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from motet_diffusion.config import EngineConfig
from motet_diffusion.engine.denoise_loop import preview_steps
from motet_diffusion.engine.engine import Engine
from motet_diffusion.engine.request import Key, PictureDone, PictureRequest
from motet_diffusion.pipeline.estimate import estimate
from motet_diffusion.pipeline.rules import DEFAULTS_FILE, folder_defaults
from motet_shared.errors import (
    BadRequest,
    ConfigError,
    InternalError,
    MotetError,
    Overloaded,
    PayloadTooLarge,
    UnsupportedParameter,
)
from support.checkpoints import diffusion_checkpoints
from support.checkpoints.diffusion_checkpoints import FAMILIES, SCHEDULERS, SIZE
from support.engine.recording_engine import Pixels, RecordingEngine, assert_alike
from support.running.refusals import refuses

STEPS = 5
RED = PictureRequest(prompt="red circle", steps=STEPS, seed=3)
COMPANY = (
    replace(RED, seed=4, guidance_scale=1.0),
    replace(RED, prompt="blue", width=2 * SIZE, steps=3),
    replace(RED, prompt="two stars", steps=7, guidance_scale=3.0, seed=9),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Checkpoints by family and options, each made once."""
    made: dict[Any, Path] = {}

    def make(family: str = "sd", **options: Any) -> Path:
        key = (family, *sorted(options.items()))
        if key not in made:
            made[key] = FAMILIES[family](tmp_path_factory.mktemp(family) / "model", **options)
        return made[key]

    return make


def reference(path: Path, drawing: PictureRequest, auto: Any = None, **arguments: Any) -> Pixels:
    """What diffusers itself draws."""
    left_out = (
        {"text_encoder_3": None, "tokenizer_3": None} if path.parent.name.startswith("sd3") else {}
    )
    pipeline = DiffusionPipeline.from_pretrained(path, low_cpu_mem_usage=False, **left_out)
    if type(pipeline).__name__.startswith("PixArt"):
        arguments |= {"use_resolution_binning": False, "clean_caption": False}
    if auto is not None:
        pipeline = auto.from_pipe(pipeline)
    if drawing.guidance_scale is not None:
        arguments["guidance_scale"] = drawing.guidance_scale
    if drawing.negative_prompt:
        arguments["negative_prompt"] = drawing.negative_prompt
    pipeline.set_progress_bar_config(disable=True)
    images = pipeline(
        prompt=drawing.prompt,
        width=drawing.width or SIZE,
        height=drawing.height or SIZE,
        num_inference_steps=drawing.steps,
        generator=torch.Generator().manual_seed(drawing.seed),
        output_type="np",
        **arguments,
    ).images
    return (images[0] * 255).round().astype(np.int64)


def sized(drawing: PictureRequest) -> PictureRequest:
    return replace(drawing, width=drawing.width or SIZE, height=drawing.height or SIZE)


# ------------------------------------------------------------------------------------------------------------ exactness
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_draws_what_diffusers_draws_alone_and_in_company(
    folder: Callable[..., Path], family: str
) -> None:
    path = folder(family)
    drawing = sized(RED)
    wanted = reference(path, drawing)
    assert wanted.std() > 5  # a picture, no surface
    with RecordingEngine(path) as recording:
        (alone,) = recording.draw(drawing)
        assert_alike(alone, wanted)
        passes = recording.engine.passes
        first, *_, last = recording.draw_together(drawing, *map(sized, COMPANY), drawing)
        assert_alike(first, wanted)
        assert_alike(last, wanted)
        together = recording.engine.passes - passes
        assert together < STEPS * 2 + 3 + 7 + STEPS  # what each alone would take


@pytest.mark.long(after=3)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_scheduler_and_guidance(folder: Callable[..., Path], scheduler: str) -> None:
    path = folder("sd", scheduler=scheduler)
    drawings = [
        replace(RED, guidance_scale=0.0),
        replace(RED, guidance_scale=4.0, negative_prompt="blue star", steps=4),
        replace(RED, height=2 * SIZE),
    ]
    with RecordingEngine(path) as recording:
        for drawing, drawn in zip(drawings, recording.draw(*drawings), strict=True):
            assert_alike(drawn, reference(path, drawing))


@pytest.mark.parametrize("family", ["sd", "sdxl", "sd3", "flux"])
def test_pictures_are_changed_wholly_and_in_part(folder: Callable[..., Path], family: str) -> None:
    path = folder(family)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (SIZE, SIZE, 3), np.uint8))
    mask = Image.fromarray(np.repeat(np.array([[0, 255]], np.uint8), SIZE, 0).repeat(SIZE // 2, 1))
    change = replace(sized(RED), image=image, strength=0.8)
    fill = replace(change, mask=mask)
    given = {"image": image, "strength": 0.8}
    with RecordingEngine(path) as recording:
        changed, filled, _ = recording.draw(change, fill, sized(RED))
    assert_alike(changed, reference(path, change, AutoPipelineForImage2Image, **given))
    assert_alike(filled, reference(path, fill, AutoPipelineForInpainting, mask_image=mask, **given))
    assert np.abs(changed - filled).max() > 5


def test_a_family_that_only_draws_is_entered_in_its_middle(folder: Callable[..., Path]) -> None:
    """PixArt: diffusers has no pipeline to compare with, but its own takes latents and times."""
    path = folder("pixart")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (SIZE, SIZE, 3), np.uint8))
    change = replace(sized(RED), image=image, strength=0.6, steps=10, checkpoint_every=2)
    nothing, all_of_it = (
        replace(change, mask=Image.new("L", (SIZE, SIZE), value)) for value in (0, 255)
    )
    with RecordingEngine(path) as recording:
        changed, kept, filled = recording.draw(change, nothing, all_of_it)
        (half,) = [step for step in recording.steps(0) if step.step == 4]
        (again,) = recording.draw(replace(change, resume=half.checkpoint, resume_step=4))
    pipeline = DiffusionPipeline.from_pretrained(path, low_cpu_mem_usage=False)
    with torch.no_grad():
        pixels = pipeline.image_processor.preprocess(image)
        latents = (
            pipeline.vae.encode(pixels).latent_dist.mode() * pipeline.vae.config.scaling_factor
        )
        decoded = pipeline.vae.decode(latents / pipeline.vae.config.scaling_factor).sample
    same = pipeline.image_processor.postprocess(decoded, output_type="np")[0]
    assert_alike(kept, (same * 255).round().astype(np.int64))
    generator = torch.Generator().manual_seed(change.seed)
    noise = torch.randn(latents.shape, generator=generator)
    pipeline.scheduler.set_timesteps(10)
    times = pipeline.scheduler.timesteps[-6:]
    noisy = pipeline.scheduler.add_noise(latents, noise, times[:1])
    assert_alike(changed, reference(path, change, latents=noisy, timesteps=times.tolist()))
    assert_alike(filled, changed)
    assert (again == changed).all()
    assert np.abs(changed - kept).max() > 5


@pytest.mark.long(after=3)
@pytest.mark.parametrize(
    ("family", "scheduler"), [("sd", name) for name in SCHEDULERS] + [("sd3", ""), ("pixart", "")]
)
def test_a_picture_goes_on_from_any_checkpoint(
    folder: Callable[..., Path], family: str, scheduler: str
) -> None:
    """To the bit: what a scheduler remembers, and the generator, are part of the checkpoint."""
    path = folder(family, **({"scheduler": scheduler} if scheduler else {}))
    drawing = replace(sized(RED), checkpoint_every=1)
    with RecordingEngine(path) as recording:
        (whole,) = recording.draw(drawing)
        checkpoints = {step.step: step.checkpoint for step in recording.steps(0) if step.checkpoint}
        last = recording.steps(0)[-1].step
        assert sorted(checkpoints) == list(range(1, last))
    with RecordingEngine(path) as other:
        for step, data in checkpoints.items():
            passes = other.engine.passes
            (again,) = other.draw(replace(drawing, resume=data, resume_step=step))
            assert (again == whole).all()
            assert other.engine.passes - passes == last - step
            assert [event.step for event in other.steps(0)] == list(range(step + 1, last + 1))


def test_a_changed_picture_goes_on_too(folder: Callable[..., Path]) -> None:
    image = Image.new("RGB", (SIZE, SIZE), "red")
    drawing = replace(
        RED, image=image, mask=Image.new("L", (SIZE, SIZE), 255), strength=0.8, checkpoint_every=2
    )
    with RecordingEngine(folder("sd", scheduler="dpm")) as recording:
        (whole,) = recording.draw(drawing)
        (middle,) = [step for step in recording.steps(0) if step.checkpoint]
        (again,) = recording.draw(
            replace(drawing, resume=middle.checkpoint, resume_step=middle.step)
        )
    assert (again == whole).all()


# ------------------------------------------------------------------------------------------------------ come and go
@given(st.data())
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whoever_joins_and_leaves_the_others_do_not_notice(
    folder: Callable[..., Path], data: st.DataObject
) -> None:
    path = folder("sd")
    choices = [RED, *COMPANY]
    with RecordingEngine(path, max_running=4) as recording:
        wanted = [recording.draw(choice)[0] for choice in choices]
        recording.events = []
        running: dict[Key, int] = {}
        cancelled: set[Key] = set()
        for number in range(data.draw(st.integers(3, 8), label="pictures")):
            which = data.draw(st.integers(0, len(choices) - 1), label="which")
            recording.engine.add(number, choices[which])
            running[number] = which
            for _ in range(data.draw(st.integers(0, 6), label="steps before the next")):
                recording.engine.step()
            if data.draw(st.booleans(), label="does one leave?"):
                gone = data.draw(st.sampled_from(sorted(running.keys() - cancelled)), label="who")  # type: ignore[type-var]
                recording.engine.cancel(gone)
                cancelled.add(gone)
            if not running.keys() - cancelled:
                break
        recording.until(lambda: not recording.engine.has_work)
        recording.collect()
        for key in running.keys() - cancelled:
            assert_alike(recording.picture(key), wanted[running[key]])


def test_a_cancelled_picture_is_in_no_further_pass(folder: Callable[..., Path]) -> None:
    with RecordingEngine(folder("sd"), max_running=2) as recording:
        recording.engine.add("long", replace(RED, steps=150))
        recording.engine.add("short", RED)
        recording.engine.add("next", RED)
        recording.until(lambda: len(recording.steps("long")) >= 3)
        recording.engine.cancel("long")
        steps = len(recording.steps("long"))
        recording.until(lambda: not recording.engine.has_work)
        recording.collect()
        assert len(recording.steps("long")) <= steps + 1  # one may just have been told
        assert not [
            event
            for event in recording.events
            if isinstance(event, PictureDone) and event.key == "long"
        ]
        assert_alike(recording.picture("short"), recording.picture("next"))
        recording.engine.cancel("long")  # again, and unknown: nothing happens
        recording.engine.cancel("never")


def test_one_bad_request_in_a_batch_spoils_no_other(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The denoiser fails on whatever holds a seed's noise; the others in its batch are computed without it."""
    with RecordingEngine(folder("sd")) as recording:
        (wanted,) = recording.draw(RED)
        noise = torch.randn((1, 4, 8, 8), generator=torch.Generator().manual_seed(66))
        forward = recording.engine.factory.denoiser.forward

        def touchy(sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if any(torch.allclose(row, noise[0], atol=1e-3) for row in sample):
                raise RuntimeError("not this one")
            return forward(sample, *args, **kwargs)

        monkeypatch.setattr(recording.engine.factory.denoiser, "forward", touchy)
        for key, drawing in {
            "good": RED,
            "bad": replace(RED, seed=66),
            "too": replace(RED, seed=5),
        }.items():
            recording.engine.add(key, drawing)
        recording.events = []
        recording.until(lambda: not recording.engine.has_work)
        recording.collect()
        assert_alike(recording.picture("good"), wanted)
        assert recording.picture("too").shape == wanted.shape
        with pytest.raises(InternalError):
            recording.picture("bad")


@pytest.mark.parametrize("scheduler", ["", "euler"])
def test_a_gpu_lost_on_the_thread_of_a_loop_ends_the_engine(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, scheduler: str
) -> None:
    def lose(*_args: Any, **_kwargs: Any) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    with RecordingEngine(folder("sd")) as recording:
        monkeypatch.setattr(recording.engine.factory.pipeline_of("draw"), "encode_prompt", lose)
        recording.engine.add("x", replace(RED, scheduler=scheduler))
        with pytest.raises(torch.AcceleratorError):
            recording.until(lambda: not recording.engine.has_work)
        assert recording.engine.has_work
        assert not recording.events


def test_wide_batches_are_cut(folder: Callable[..., Path]) -> None:
    with RecordingEngine(folder("sd"), max_rows=2) as recording:
        one, other = recording.draw(RED, RED)
        assert recording.engine.rows == 2 * recording.engine.passes
        assert (one == other).all()


# ------------------------------------------------------------------------------------------- casts of the shared VAE
# diffusers warns of a call of its own.
UPCASTS = pytest.mark.filterwarnings("ignore:.upcast_vae. is deprecated:FutureWarning")


def slow_decode(monkeypatch: pytest.MonkeyPatch, vae: Any) -> set[torch.dtype]:
    """Make `decode` so slow that another picture arrives; return the types that it finds."""
    decode, found = vae.decode, set[torch.dtype]()

    def slow(*args: Any, **kwargs: Any) -> Any:
        found.add(vae.dtype)
        time.sleep(0.5)
        found.add(vae.dtype)
        return decode(*args, **kwargs)

    monkeypatch.setattr(vae, "decode", slow)
    return found


@UPCASTS
def test_pictures_that_are_decoded_together_cast_the_vae_in_turn(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with RecordingEngine(folder("sdxl"), dtype="float16") as recording:
        vae = recording.engine.factory.vae
        found = slow_decode(monkeypatch, vae)
        recording.draw_together(sized(RED), sized(RED))
        assert found == {torch.float32}
        assert vae.dtype == torch.float16


def test_a_picture_that_is_decoded_while_another_encodes_has_its_own_type(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, SDXL casts the VAE where it encodes, and not where it decodes."""
    change = replace(sized(RED), image=Image.new("RGB", (SIZE, SIZE), "red"), strength=0.8)
    with RecordingEngine(folder("sdxl"), dtype="bfloat16") as recording:
        vae = recording.engine.factory.vae
        found, encode, cast = slow_decode(monkeypatch, vae), vae.encode, vae.to
        encoding, go_on = threading.Event(), threading.Event()

        def waiting_encode(*args: Any, **kwargs: Any) -> Any:
            encoding.set()
            assert go_on.wait(30)
            return encode(*args, **kwargs)

        def slow_cast(*args: Any, **kwargs: Any) -> Any:
            time.sleep(0.2)
            return cast(*args, **kwargs)

        monkeypatch.setattr(vae, "encode", waiting_encode)
        monkeypatch.setattr(vae, "to", slow_cast)
        recording.engine.add("change", change)
        recording.engine._admit()
        assert encoding.wait(30)
        recording.engine.add("draw", sized(RED))
        recording.until(lambda: len(recording.steps("draw")) == STEPS)
        time.sleep(0.1)  # until the loop is at its decoding
        go_on.set()
        recording.until(lambda: not recording.engine.has_work)
        recording.collect()
        assert found == {torch.bfloat16}
        assert recording.picture("draw").std() > 5
        assert recording.picture("change").std() > 5


@UPCASTS
def test_a_decoding_that_fails_leaves_the_vae_its_type(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    with RecordingEngine(folder("sdxl"), dtype="float16") as recording:
        vae = recording.engine.factory.vae
        with monkeypatch.context() as patch:
            patch.setattr(vae, "decode", fail)
            with pytest.raises(InternalError):
                recording.draw(sized(RED))
        assert vae.dtype == torch.float16
        (drawn,) = recording.draw(sized(RED))
        assert drawn.std() > 5


# ------------------------------------------------------------------------------------------------------------ previews
@pytest.mark.parametrize("family", FAMILIES)
def test_estimates_end_at_the_picture(folder: Callable[..., Path], family: str) -> None:
    """The estimate is of the finished latents: near the end it is what the last step makes."""
    with RecordingEngine(folder(family)) as recording:
        drawing = replace(sized(RED), steps=12, previews=11, checkpoint_every=1)
        recording.draw(drawing)
        shown = [step.estimate for step in recording.steps(0) if step.estimate is not None]
        assert 6 <= len(shown) <= 11
        assert all(
            guess.shape == (1, 16 if family == "sd3" else 4, 8, 8) and bool(guess.isfinite().all())
            for guess in shown
        )
        changes = [float((guess - shown[-1]).abs().mean()) for guess in shown[:-1]]
        assert changes[-1] < changes[0]
        preview = recording.engine.rgb_preview.picture(shown[-1], (SIZE, SIZE))
        assert preview.size == (SIZE, SIZE)


@pytest.mark.parametrize("scheduler", ["ddim", "euler", "v", "lcm"])
def test_an_estimate_is_the_schedulers_own(folder: Callable[..., Path], scheduler: str) -> None:
    """Where a scheduler tells what it expects, ours is the same."""
    made = SCHEDULERS[scheduler]()
    made.set_timesteps(6)
    generator = torch.Generator().manual_seed(0)
    sample, output = (torch.randn((1, 4, 8, 8), generator=generator) for _ in range(2))
    for moment in made.timesteps[:3]:
        made.scale_model_input(sample, moment)
        ours = estimate(made, output, moment, sample)
        result = made.step(output, moment, sample, return_dict=True)
        if scheduler != "lcm":  # which adds its boundary condition
            torch.testing.assert_close(ours, result.pred_original_sample, atol=1e-4, rtol=1e-4)
        assert bool(ours.isfinite().all())
        sample = result.prev_sample


@pytest.mark.parametrize(
    ("count", "steps", "wanted"),
    [
        (0, 20, []),
        (1, 20, [4]),
        (2, 20, [4, 16]),
        (3, 20, [4, 10, 16]),
        (3, 4, [1, 2, 3]),
        (8, 2, [1]),
        (3, 1, []),
        (20, 20, [*range(4, 17)]),
        (2**63, 20, [*range(4, 17)]),  # of a request that the gateway would refuse
    ],
)
def test_previews_come_soon_and_evenly(count: int, steps: int, wanted: list[int]) -> None:
    assert sorted(preview_steps(count, steps)) == wanted


# ------------------------------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"width": 15}, BadRequest, "size"),
        ({"width": -2}, BadRequest, "size"),
        (
            {"width": 1 << 12, "height": 1 << 12},
            PayloadTooLarge,
            "size",
        ),
        ({"steps": 100_000}, BadRequest, "steps"),
        ({"steps": -1}, BadRequest, "steps"),
        ({"guidance_scale": -1.0}, BadRequest, "guidance_scale"),
        ({"guidance_scale": float("nan")}, BadRequest, "guidance_scale"),
        ({"strength": 1.5}, BadRequest, "strength"),
        (
            {"strength": 0.01, "image": Image.new("RGB", (16, 16))},
            BadRequest,
            "strength",
        ),
    ],
)
def test_refusals(
    folder: Callable[..., Path], fields: dict[str, Any], error: type[MotetError], param: str
) -> None:
    with RecordingEngine(folder("sd")) as recording, refuses(error, param):
        recording.engine.add("x", replace(RED, **fields))


def test_a_folder_says_what_is_best_where_a_request_does_not(
    folder: Callable[..., Path], tmp_path: Path
) -> None:
    plain = shutil.copytree(folder("pixart"), tmp_path / "model")
    asked = replace(RED, steps=3, guidance_scale=2.5)
    with RecordingEngine(plain, text_length=12) as recording:
        (due,) = recording.draw(asked)
    own = {
        "num_inference_steps": 3,
        "guidance_scale": 2.5,
        "max_sequence_length": 12,
        "strength": 0.5,
    }
    (plain / DEFAULTS_FILE).write_text(json.dumps(own))
    with RecordingEngine(plain) as recording:
        (drawn,) = recording.draw(replace(RED, steps=0, guidance_scale=None))
        assert_alike(drawn, due)
        completed = recording.engine.factory.rules.completed(
            replace(RED, steps=7, guidance_scale=None)
        )
        assert (completed.steps, completed.guidance_scale, completed.strength) == (7, 2.5, 0.5)
    with RecordingEngine(plain, guidance=1.5) as recording:
        assert (
            recording.engine.factory.rules.completed(
                replace(RED, guidance_scale=None)
            ).guidance_scale
            == 1.5
        )


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("{", DEFAULTS_FILE),
        ("[]", "num_inference_steps"),
        ('{"cfg": 3}', "cfg"),
        ('{"guidance_scale": "3"}', "guidance_scale: '3'"),
        ('{"num_inference_steps": 2.5}', r"num_inference_steps: 2\.5"),
        ('{"guidance_scale": NaN}', "guidance_scale: nan"),
    ],
)
def test_what_a_folder_says_amiss_is_refused(tmp_path: Path, content: str, named: str) -> None:
    (tmp_path / DEFAULTS_FILE).write_text(content)
    with pytest.raises(ConfigError, match=named):
        folder_defaults(tmp_path)


def test_checkpoints_of_other_pictures_are_refused(folder: Callable[..., Path]) -> None:
    with RecordingEngine(folder("sd")) as recording:
        recording.draw(replace(RED, checkpoint_every=1))
        (data, *_) = [step.checkpoint for step in recording.steps(0) if step.checkpoint]
        for wrong in (
            replace(RED, resume=b"nonsense", resume_step=1),
            replace(RED, resume=data[:100], resume_step=1),
            replace(RED, resume=data, resume_step=1, width=2 * SIZE),
            replace(RED, resume=data, resume_step=99),
        ):
            with refuses(BadRequest, "resume"):
                recording.draw(wrong)


def test_a_family_that_does_not_change_pictures_says_so(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motet_diffusion.pipeline.rules.supports_sdedit", lambda _: False)
    with (
        RecordingEngine(folder("pixart")) as recording,
        refuses(UnsupportedParameter, "image"),
    ):
        recording.engine.add("x", replace(RED, image=Image.new("RGB", (SIZE, SIZE))))


def test_a_full_queue_is_overloaded(folder: Callable[..., Path]) -> None:
    with RecordingEngine(folder("sd"), max_running=1, max_waiting=1) as recording:
        recording.engine.add("a", RED)
        recording.engine.add("b", RED)
        with pytest.raises(Overloaded, match="max_waiting"):
            recording.engine.add("c", RED)


def test_folders_that_are_no_models(tmp_path: Path, folder: Callable[..., Path]) -> None:
    with refuses(ConfigError, "model"):
        EngineConfig(model=str(tmp_path))
    (tmp_path / "model_index.json").write_text(
        '{"_class_name": "StableDiffusionPipeline", "unet": ["diffusers", "X"]}'
    )
    with refuses(ConfigError, "model"):
        Engine(EngineConfig(model=str(tmp_path)), print)
    with refuses(ConfigError, "dtype"):
        EngineConfig(model=str(folder("sd")), dtype="int3")


def test_the_checkpoints_are_diffusers_own(tmp_path: Path) -> None:
    """A tiny folder loads without us, as a real one does."""
    path = diffusion_checkpoints.pixart(tmp_path / "model")
    assert (
        type(DiffusionPipeline.from_pretrained(path, low_cpu_mem_usage=False)).__name__
        == "PixArtSigmaPipeline"
    )
