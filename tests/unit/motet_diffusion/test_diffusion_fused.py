"""With the GPU kernels, on a GPU or in Triton's interpreter: the same pictures, and it is they that draw them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from motet_diffusion.engine.request import PictureRequest
from motet_diffusion.kernels import fused, guided
from motet_diffusion.kernels.fused import fuse
from motet_diffusion.kernels.guided import deferred_guidance, fused_step, is_linear
from motet_kernels import gpu
from support.checkpoints.diffusion_checkpoints import FAMILIES, LENGTH, SCHEDULERS, SIZE
from support.engine.recording_engine import RecordingEngine, assert_alike

RED = PictureRequest(
    prompt="red circle", steps=1, seed=3, width=SIZE, height=SIZE, guidance_scale=3.0
)
LINEAR = {"ddim", "euler", "v"}
CUDA = torch.cuda.is_available()
RUNS = "on" if CUDA else "interpret"


@pytest.fixture
def device() -> Iterator[torch.device]:
    """Where the kernels take tensors."""
    gpu.select(RUNS)
    yield torch.device("cuda" if CUDA else "cpu")
    gpu.select("")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each kernel is called."""
    counts: Counter[str] = Counter()
    for module, name in (
        (fused, "group_norm"),
        (fused, "modulated_norm"),
        (fused, "gated_add"),
        (guided, "guided_step"),
        (guided, "guided"),
    ):
        monkeypatch.setattr(module, name, _counted(counts, name, getattr(module, name)))
    return counts


def _counted(counts: Counter[str], name: str, function: Any) -> Any:
    def counted(*args: Any, **kwargs: Any) -> Any:
        followed = kwargs.get("silu") or (name == "modulated_norm" and args[2] is not None)
        counts[f"{name} and more" if followed else name] += 1
        return function(*args, **kwargs)

    return counted


# What the tiny models call at least.
EXPECTED = {
    "sd": {"group_norm and more", "guided_step"},
    "sd3": {"group_norm and more", "modulated_norm and more", "gated_add", "guided_step"},
    "flux": {"group_norm and more", "modulated_norm and more", "gated_add"},
    "pixart": {"group_norm and more", "modulated_norm and more", "gated_add", "guided"},
}


@pytest.mark.extended("families", after=1)
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", EXPECTED)
def test_pictures_are_those_of_the_model_as_it_was(
    tmp_path: Path, family: str, device: torch.device, calls: Counter[str]
) -> None:
    path = FAMILIES[family](tmp_path / "model")
    options: Any = {"packed": False, "device": str(device), "text_length": LENGTH}
    gpu.select("off")
    with RecordingEngine(path, **options) as recording:
        (wanted,) = recording.draw(RED)
    assert not calls
    gpu.select(RUNS)
    with RecordingEngine(path, patience=500, **options) as recording:
        calls.clear()
        (drawn,) = recording.draw(RED)
    assert_alike(drawn, wanted)
    assert EXPECTED[family] <= calls.keys()


# ------------------------------------------------------------------------------------------------------------ schedules
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_whose_steps_are_sums_are_found(name: str) -> None:
    assert is_linear(SCHEDULERS[name]()) == (name in LINEAR)


def test_flow_matching_is_a_sum_and_clipping_is_none() -> None:
    from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

    assert is_linear(FlowMatchEulerDiscreteScheduler(shift=3.0))
    assert is_linear(FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True))
    assert not is_linear(DDIMScheduler(clip_sample=True))
    assert not is_linear(object())


@pytest.mark.parametrize("name", sorted(LINEAR))
def test_a_step_and_its_guidance_are_one_kernel(
    name: str, device: torch.device, calls: Counter[str]
) -> None:
    """The loop of a pipeline as diffusers writes it, with what else a scheduler returns."""
    schedulers = [SCHEDULERS[name](), SCHEDULERS[name]()]
    for scheduler in schedulers:
        scheduler.set_timesteps(4)
    sample = torch.randn(1, 4, 3, 5, device=device)
    for time in schedulers[0].timesteps:
        said = torch.randn(2, 4, 3, 5, device=device)
        results = []
        for answer in (said, *deferred_guidance((said,))):
            without, with_text = answer.chunk(2)
            results.append(without + 2.5 * (with_text - without))
        due = schedulers[0].step(results[0], time, sample, return_dict=False)
        made = fused_step(schedulers[1].step, results[1], time, sample, return_dict=False)
        assert len(made) == len(due)
        for one, other in zip(made, due, strict=True):
            torch.testing.assert_close(one + 0, other, rtol=1e-4, atol=1e-4)
        sample = due[0]
    assert calls["guided"] == 0
    assert calls["guided_step"] > 0


def test_an_answer_is_what_it_is_whatever_is_done_to_it(device: torch.device) -> None:
    said = torch.randn(2, 8, 3, device=device)
    (pending,) = deferred_guidance((said,))
    without, with_text = pending.chunk(2)
    difference = with_text - without
    torch.testing.assert_close(difference.abs(), (said[1:] - said[:1]).abs())
    torch.testing.assert_close(with_text + 2 * difference, said[1:] + 2 * (said[1:] - said[:1]))
    torch.testing.assert_close(without + difference, said[1:])
    torch.testing.assert_close(
        (without + difference * 3).chunk(2, dim=1)[0], (said[:1] + 3 * (said[1:] - said[:1]))[:, :4]
    )
    torch.testing.assert_close(pending.mean(), said.mean())
    odd = torch.randn(1, 3, device=device)
    assert deferred_guidance((odd,))[0] is odd


# --------------------------------------------------------------------------------------------------------------- models
class Block(nn.Module):
    """A block of a diffusion transformer, and what could be mistaken for one."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.adapters = nn.Linear(width, width)
        self.plain = nn.Linear(width, width)

    def forward(self, x: Tensor, row: Tensor) -> Tensor:
        normed = self.norm(x)
        x = x + row * self.adapters(normed * (1 + row) + row)
        x = self.plain(normed * 2) + x
        return x * (normed + 1).mean(1, keepdim=True)


class Model(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width), Block(width)])
        self.out = nn.GroupNorm(2, width)

    def forward(self, x: Tensor, row: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, row)
        return nn.functional.silu(self.out(x.transpose(1, 2)[..., None]))


def test_what_is_not_gated_and_not_modulated_stays_right(
    device: torch.device, calls: Counter[str]
) -> None:
    torch.manual_seed(0)
    model, x, row = (
        Model().to(device),
        torch.randn(2, 3, 8, device=device),
        torch.randn(2, 1, 8, device=device),
    )
    with torch.no_grad():
        due = model(x, row)
        assert fuse(model, lambda: model(x, row)) == 5  # two norms, two gates, a group norm
        assert "forward" not in vars(model.blocks[0].plain)
        calls.clear()
        torch.testing.assert_close(model(x, row), due, rtol=1e-4, atol=1e-4)
    assert calls["gated_add"] == 2
    assert calls["group_norm and more"] == 1


def test_a_model_that_would_change_stays_as_it_was(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever goes wrong: a kernel that gives something else, and one that fails."""
    torch.manual_seed(0)
    model, x, row = (
        Model().to(device),
        torch.randn(2, 3, 8, device=device),
        torch.randn(2, 1, 8, device=device),
    )
    for wrong in (lambda residual, gate, x: residual, lambda residual, gate, x: 1 / 0):
        monkeypatch.setattr(fused, "gated_add", wrong)
        with torch.no_grad():
            due = model(x, row)
            assert fuse(model, lambda: model(x, row)) == 0
            assert torch.equal(model(x, row), due)
        assert not any("forward" in vars(module) for module in model.modules())


def test_nothing_is_done_to_a_model_on_a_cpu() -> None:
    model = Model()
    assert fuse(model, lambda: torch.zeros(0)) == 0
    assert not any("forward" in vars(module) for module in model.modules())
