"""Test the training loop that recipes share: rates, updates, saved states, stopping."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

import recipes
from recipes.training.averages import Average
from recipes.training.errors import RecipeError
from recipes.training.loop import Schedule, Training, make_readable
from recipes.training.muon import orthogonalize
from recipes.training.prefetch import prefetched
from recipes.training.ranks import Ranks

STEPS = 6


class OutOfNumbers(Exception):
    """Fail a training step."""


class Lines(Training[torch.Tensor, float]):
    """Train a layer to double numbers."""

    def __init__(self, steps: int = STEPS, breaks_at: int = -1) -> None:
        torch.manual_seed(3)
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
        super().__init__(
            module, Schedule(steps=steps, warmup=2, decay=0.01), matrix_lr=0.02, other_lr=0.01
        )
        self.breaks_at = breaks_at

    def batches(self) -> Iterator[torch.Tensor]:
        while self.step < self.schedule.steps:
            yield torch.randn(8, 4, generator=torch.Generator().manual_seed(self.step))

    def train_step(self, batch: torch.Tensor) -> float:
        if self.step == self.breaks_at:
            raise OutOfNumbers
        loss = (self.module(batch) - 2 * batch).square().mean()
        loss.backward()
        self.update()
        return float(loss.detach())

    def progress(self, reports: Sequence[float], seconds: float) -> str:
        return f"{self.step}: {len(reports)} steps, {seconds >= 0}"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "state.pt"


def test_a_run_ends_with_its_schedule_and_says_where_it_is(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(Lines().run(state, log=2)) == STEPS
    assert capsys.readouterr().out.splitlines() == [f"{step}: 2 steps, True" for step in (2, 4, 6)]


def test_a_run_that_is_resumed_takes_the_course_of_one_that_is_not(state: Path) -> None:
    undisturbed = Lines().run(state)
    first = Lines(steps=3).run(state)
    resumed = Lines()
    resumed.load_state(state)
    assert resumed.step == 3
    assert first + resumed.run(state) == undisturbed


def test_saved_states_have_fixed_keys(state: Path) -> None:
    trainer = Lines()
    trainer.run(state)
    saved = torch.load(state, weights_only=True)
    assert set(saved) == {"step", "model", "optimizers"}
    assert saved["step"] == STEPS
    assert set(saved["model"]) == set(trainer.module.state_dict())
    assert len(saved["optimizers"]) == 2
    trainer.saved_as = "part"
    trainer.save_state(state)
    assert set(torch.load(state, weights_only=True)) == {"step", "part", "optimizers"}
    assert [path.name for path in state.parent.iterdir()] == [state.name], (
        "nothing else is left behind"
    )


def test_the_state_is_saved_when_a_step_fails(state: Path) -> None:
    with pytest.raises(OutOfNumbers):
        Lines(breaks_at=4).run(state)
    resumed = Lines()
    resumed.load_state(state)
    assert resumed.step == 4
    assert len(resumed.run(state)) == STEPS - 4


def test_the_state_is_saved_on_the_way(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, saved = Lines(), []
    monkeypatch.setattr(trainer, "save_state", lambda path: saved.append(trainer.step))
    trainer.run(state, every=0.0)
    assert saved == [*range(1, STEPS + 1), STEPS]


def test_a_file_stop_ends_a_run_after_a_step(state: Path) -> None:
    state.parent.mkdir()
    (state.parent / "stop").touch()
    assert len(Lines().run(state)) == 1
    assert torch.load(state, weights_only=True)["step"] == 1


def test_a_follower_saves_and_prints_nothing(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    follower = Lines()
    follower.ranks = Ranks(rank=1)
    assert len(follower.run(state, every=0.0, log=1)) == STEPS
    assert not state.exists()
    assert not capsys.readouterr().out


def test_rates_follow_the_schedule_from_their_peaks(state: Path) -> None:
    trainer = Lines()
    batch = next(trainer.batches())
    trainer.train_step(batch)
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    assert rates == pytest.approx([0.02 / 2, 0.01 / 2]), "the first of two steps of warm-up"
    trainer.module(batch).sum().backward()
    trainer.update(rate=0.1)
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    assert rates == pytest.approx([0.002, 0.001])
    assert all(parameter.grad is None for parameter in trainer.module.parameters())


def test_a_folder_is_made_readable(tmp_path: Path) -> None:
    (tmp_path / "weights").touch(mode=0o600)
    make_readable(tmp_path)
    assert (tmp_path / "weights").stat().st_mode & 0o777 == 0o644


def test_schedule_warms_up_stays_and_decays_to_zero() -> None:
    schedule = Schedule(steps=100, warmup=10, decay=0.2)
    factors = [schedule.factor(step) for step in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert set(factors[9:81]) == {1.0}
    assert factors[80:] == sorted(factors[80:], reverse=True)
    assert 0 < factors[-1] < 0.1


def test_schedule_falls_again_after_each_restart() -> None:
    restarts = ((100, 0.5), (200, 0.2))
    plain, again = (
        Schedule(steps=steps, warmup=10, decay=0.2, restarts=restarts) for steps in (100, 300)
    )
    assert [again.factor(step) for step in range(100)] == [
        plain.factor(step) for step in range(100)
    ]
    assert again.factor(100) == pytest.approx(0.05)
    assert again.factor(150) == pytest.approx(0.25)
    assert 0 < again.factor(199) < 0.01
    assert again.factor(250) == pytest.approx(0.1)
    assert 0 < again.factor(299) < 0.01


@pytest.mark.parametrize("shape", [(3, 16, 40), (2, 40, 16)])
def test_muon_updates_are_nearly_semi_orthogonal(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalize(torch.randn(*shape)))
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.4


def test_a_run_needs_time(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as refused:
        Lines().run(tmp_path / "state.pt", seconds=0.0)
    assert refused.value.param == "seconds"


class Timed(Lines):
    """Train until its time is over, and note the rates."""

    def __init__(self) -> None:
        super().__init__()
        self.schedule = Schedule(steps=100, warmup=10, decay=0.5)
        self.rates: list[float] = []

    def batches(self) -> Iterator[torch.Tensor]:
        for step in range(self.step, self.last_step):
            yield torch.randn(8, 4, generator=torch.Generator().manual_seed(step))

    def train_step(self, batch: torch.Tensor) -> float:
        time.sleep(0.01)
        loss = super().train_step(batch)
        self.rates.append(self.optimizers[0].param_groups[0]["lr"] / 0.02)
        return loss


def test_a_run_bound_by_time_stretches_its_schedule_over_it(state: Path) -> None:
    trainer = Timed()
    begun = time.monotonic()
    reports = trainer.run(state, seconds=1.0)
    assert 0.9 < time.monotonic() - begun < 10
    assert trainer.share == 1.0
    assert trainer.step == len(reports) == len(trainer.rates) < 101
    assert max(trainer.rates) <= 1.0
    assert trainer.rates[-1] < max(trainer.rates)
    assert torch.load(state, weights_only=True)["step"] == trainer.step


def test_a_factor_never_falls_below_zero() -> None:
    schedule = Schedule(steps=10, warmup=2, decay=0.5)
    assert schedule.factor(10.0) == schedule.factor(12.5) == 0.0
    assert schedule.factor(4.5) == 1.0


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_come_in_order_from_any_number_of_processes(workers: int) -> None:
    made = list(prefetched(square, range(3, 9), workers=workers))
    assert [int(one) for one in made] == [9, 16, 25, 36, 49, 64]


def square(step: int) -> torch.Tensor:
    return torch.tensor(step * step)


def test_an_average_is_the_mean_of_the_states_that_it_followed() -> None:
    layer = torch.nn.Linear(2, 2, bias=False)
    tied = torch.nn.ModuleDict({"first": layer, "second": torch.nn.Linear(2, 2, bias=False)})
    tied["second"].weight = layer.weight
    average = Average(tied)
    for value in (1.0, 2.0, 6.0):
        torch.nn.init.constant_(layer.weight, value)
        average.follow()
    assert set(average.state()) == {"first.weight", "second.weight"} == set(tied.state_dict())
    for one in average.state().values():
        assert torch.allclose(one, torch.full((2, 2), 3.0))
    assert torch.equal(layer.weight, torch.full((2, 2), 6.0))


SHARED_RUN = """
import sys
from pathlib import Path

import torch
from recipes.training.loop import Schedule, Training
from recipes.training.ranks import run_ranks


class Halves(Training):
    def __init__(self, ranks):
        torch.manual_seed(3)
        schedule = Schedule(steps=6, warmup=2, decay=0.01)
        super().__init__(torch.nn.Linear(4, 4), schedule, matrix_lr=0.02, other_lr=0.01)
        self.ranks = ranks

    def batches(self):
        for step in self.steps_left:
            whole = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            yield whole[self.ranks.rank :: self.ranks.count]

    def train_step(self, batch):
        (self.module(batch) - 2 * batch).square().mean().backward()
        self.mean_gradients()
        self.update()

    def progress(self, reports, seconds):
        return "progress"


def train(ranks, folder):
    whole, timed = Halves(ranks), Halves(ranks)
    whole.run(folder / "state.pt", log=3)
    timed.run(folder / "timed.pt", log=10**9, seconds=0.5 if ranks.is_leader else 60.0)
    torch.save([whole.module.state_dict(), timed.step], folder / f"{ranks.rank}.pt")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    run_ranks(train, folder, count=int(sys.argv[2]), state=folder / "state.pt")
"""


def test_ranks_take_the_steps_of_one_process_and_end_together(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(SHARED_RUN, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(Path(recipes.__file__).parents[1])}
    found = {}
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        argv = [sys.executable, str(program), str(folder), str(count)]
        done = subprocess.run(
            argv, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["progress"] * 2, "the leader alone prints"
        found[count] = [torch.load(folder / f"{rank}.pt") for rank in range(count)]
    (alone, _), (first, steps), (second, others_steps) = found[1] + found[2]
    assert steps == others_steps, "the leader's clock ends the run of all"
    for name, weight in alone.items():
        torch.testing.assert_close(first[name], weight, rtol=1e-4, atol=1e-5)
        assert torch.equal(first[name], second[name])
