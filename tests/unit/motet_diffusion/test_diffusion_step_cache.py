"""The first-block cache: off it changes nothing, on it leaves blocks out, for each row by itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from motet_diffusion.config import EngineConfig
from motet_diffusion.engine.engine import Engine
from motet_diffusion.engine.request import Lora, PictureRequest
from motet_shared.errors import ConfigError
from support.checkpoints.diffusion_checkpoints import FAMILIES, SIZE, write_adapter
from support.engine.recording_engine import RecordingEngine, assert_alike
from support.families import picture_families
from support.running.refusals import refuses

STEPS = 16
RED = PictureRequest(prompt="red circle", width=SIZE, height=SIZE, steps=STEPS, seed=3)
OTHERS = (replace(RED, seed=4, guidance_scale=1.0), replace(RED, prompt="blue", steps=9))
# Its blocks are of the kind of Flux's first ones.
SD3 = pytest.param("sd3", marks=pytest.mark.extended("families"))


@pytest.fixture(scope="module", params=["flux", "pixart", SD3])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES[request.param](tmp_path_factory.mktemp(request.param) / "model")


def test_a_threshold_that_nothing_keeps_changes_nothing(folder: Path) -> None:
    with RecordingEngine(folder) as recording, RecordingEngine(folder, step_cache=1e-12) as cached:
        (wanted,), (drawn,) = recording.draw(RED), cached.draw(RED)
        assert (drawn == wanted).all()
        assert not cached.engine.stats()["rows_skipped"]


def test_rows_are_left_out_each_by_itself(folder: Path) -> None:
    """In company as alone: what one row decides is no other row's affair."""
    with RecordingEngine(folder) as recording, RecordingEngine(folder, step_cache=0.3) as cached:
        (exact,) = recording.draw(RED)
        (alone,) = cached.draw(RED)
        skipped = cached.engine.stats()["rows_skipped"]
        rows = cached.engine.rows
        assert 0 < skipped < rows
        assert np.abs(alone - exact).mean() < 40  # the picture is another one, but no noise
        together, *_ = cached.draw(RED, *OTHERS)
        assert_alike(together, alone)
        assert cached.engine.cache is not None
        assert not cached.engine.cache._cache


def test_everything_may_be_left_out_but_the_first_step(folder: Path) -> None:
    with RecordingEngine(folder, step_cache=1e9) as cached:
        cached.draw(RED)
        assert cached.engine.cache is not None
        assert cached.engine.cache.computed * STEPS == cached.engine.rows


def test_the_two_calls_of_a_step_are_told_apart(tmp_path: Path) -> None:
    """Qwen-Image calls its denoiser for the prompt, then for the negative one."""
    model = picture_families.write("QwenImagePipeline", tmp_path / "model")
    with RecordingEngine(model, step_cache=1e9) as cached:
        cached.draw(replace(RED, negative_prompt="blue", guidance_scale=4.0))
        assert cached.engine.cache is not None
        assert cached.engine.rows == 2 * STEPS
        assert cached.engine.cache.computed == 2


@pytest.mark.long
@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_rows_that_are_left_out_leave_their_adapters_out(family: str, tmp_path: Path) -> None:
    """A layer then gets fewer rows than the pass has, and each has its own picture's adapters."""
    model = FAMILIES[family](tmp_path / family / "model")
    ink = write_adapter(model, tmp_path / "ink.safetensors", 1)
    inked = replace(RED, loras=(Lora("ink", 0.3),))
    with RecordingEngine(model, step_cache=0.3, loras=(f"ink={ink}",)) as cached:
        (plain,), (alone,) = cached.draw(RED), cached.draw(inked)
        assert 0 < cached.engine.stats()["rows_skipped"] < cached.engine.rows
        assert np.abs(plain - alone).max() > 5
        drawn, other, *_ = cached.draw(inked, RED, *OTHERS)
        assert_alike(drawn, alone)
        assert_alike(other, plain)


def test_a_unet_has_no_such_chain(tmp_path: Path) -> None:
    path = FAMILIES["sd"](tmp_path / "model")
    with refuses(ConfigError, "step_cache"):
        Engine(EngineConfig(model=str(path), step_cache=0.1), print)
