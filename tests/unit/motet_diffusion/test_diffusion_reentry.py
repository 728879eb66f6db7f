"""Pictures that are changed by entering a drawing pipeline in its middle, with the schedules that diffusers has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from motet_diffusion.engine.request import PictureRequest
from support.checkpoints import diffusion_checkpoints
from support.checkpoints.diffusion_checkpoints import SIZE
from support.engine.recording_engine import RecordingEngine

STEPS = 6
_BETAS: dict[str, Any] = {"beta_start": 0.0001, "beta_end": 0.02, "beta_schedule": "linear"}
_FLOW: dict[str, Any] = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "flow_shift": 3.0,
}
SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    "dpm": ("DPMSolverMultistepScheduler", {}),
    "dpm-flow": ("DPMSolverMultistepScheduler", _FLOW),
    "dpm-karras": ("DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    "dpm-exponential": ("DPMSolverMultistepScheduler", {"use_exponential_sigmas": True}),
    "dpm-lu": ("DPMSolverMultistepScheduler", {"use_lu_lambdas": True}),
    "dpm-sde": ("DPMSolverMultistepScheduler", {"algorithm_type": "sde-dpmsolver++"}),
    "dpm-single": ("DPMSolverSinglestepScheduler", {}),
    "dpm-single-flow": ("DPMSolverSinglestepScheduler", _FLOW),
    "unipc": ("UniPCMultistepScheduler", {}),
    "unipc-flow": ("UniPCMultistepScheduler", _FLOW),
    "deis": ("DEISMultistepScheduler", {}),
    "deis-flow": ("DEISMultistepScheduler", _FLOW),
    "euler": ("EulerDiscreteScheduler", {}),
    "euler-karras": ("EulerDiscreteScheduler", {"use_karras_sigmas": True}),
    "ancestral": ("EulerAncestralDiscreteScheduler", {}),
    "heun": ("HeunDiscreteScheduler", {}),
    "kdpm2": ("KDPM2DiscreteScheduler", {}),
    "ddim": ("DDIMScheduler", {"clip_sample": False}),
    "ddpm": ("DDPMScheduler", {"clip_sample": False}),
    "pndm": ("PNDMScheduler", {"skip_prk_steps": True}),
    "lcm": ("LCMScheduler", {}),
}
IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (SIZE, SIZE, 3), np.uint8))
CHANGE = PictureRequest(
    prompt="a red circle",
    width=SIZE,
    height=SIZE,
    steps=STEPS,
    guidance_scale=2.0,
    seed=3,
    image=IMAGE,
)


@pytest.mark.filterwarnings(
    "ignore:__array_wrap__ must accept context:DeprecationWarning"
)  # diffusers with NumPy 2
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_can_be_entered(schedule: str, tmp_path: Path) -> None:
    """From its first step it draws what diffusers draws from the same latents; in its middle it makes fewer steps."""
    name, fields = SCHEDULES[schedule]
    scheduler = getattr(diffusers, name)(**_BETAS, **fields)
    path = diffusion_checkpoints.pixart(tmp_path / "model", scheduler=scheduler)
    nothing = Image.new("L", (SIZE, SIZE), 0)
    with RecordingEngine(path) as recording:
        whole, half, kept = recording.draw(
            replace(CHANGE, strength=1.0),
            replace(CHANGE, strength=0.5),
            replace(CHANGE, strength=0.5, mask=nothing),
        )
        counts = [recording.steps(index)[-1] for index in (0, 1)]
    pipeline = DiffusionPipeline.from_pretrained(path, low_cpu_mem_usage=False)
    assert np.abs(whole - _drawn(pipeline)).max() <= 2
    assert np.abs(kept - _through_the_vae(pipeline)).max() <= 2
    assert np.abs(half - kept).max() > 5
    assert counts[0].step == counts[0].steps
    assert counts[1].step == counts[1].steps < counts[0].steps


def _latents(pipeline: Any) -> torch.Tensor:
    with torch.no_grad():
        pixels = pipeline.image_processor.preprocess(IMAGE)
        found: torch.Tensor = (
            pipeline.vae.encode(pixels).latent_dist.mode() * pipeline.vae.config.scaling_factor
        )
    return found


def _through_the_vae(pipeline: Any) -> Any:
    with torch.no_grad():
        decoded = pipeline.vae.decode(
            _latents(pipeline) / pipeline.vae.config.scaling_factor
        ).sample
    return (
        (pipeline.image_processor.postprocess(decoded, output_type="np")[0] * 255)
        .round()
        .astype(np.int64)
    )


def _drawn(pipeline: Any) -> Any:
    """What diffusers' own loop makes of the noisy picture, all steps of it."""
    generator = torch.Generator().manual_seed(CHANGE.seed)
    latents = _latents(pipeline)
    noise = torch.randn(latents.shape, generator=generator)
    scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config)
    scheduler.set_timesteps(STEPS)
    noisy = (
        scheduler.add_noise(latents, noise, scheduler.timesteps[:1]) / scheduler.init_noise_sigma
    )
    drawn = pipeline(
        prompt=CHANGE.prompt,
        width=SIZE,
        height=SIZE,
        num_inference_steps=STEPS,
        guidance_scale=2.0,
        generator=generator,
        latents=noisy,
        output_type="np",
        use_resolution_binning=False,
        clean_caption=False,
    )
    return (drawn.images[0] * 255).round().astype(np.int64)
