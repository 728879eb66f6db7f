"""When drafts pay: on a simulated engine whose steps take what is said, with no clock but its own."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motet_llm.speculation.controller import AcceptanceEstimate, SpeculationController


@dataclass
class Engine:
    """`rows` requests that decode. Seconds: a step takes 1, `fixed` more with any draft, `token` more for each token
    of one; each is right with a probability of `right`. noise: by which steps vary, as a share. slow: first
    steps, which take 0.4 more."""

    rows: int
    token: float
    right: float
    fixed: float = 0.0
    noise: float = 0.0
    most: int = 5
    seed: int = 0
    slow: int = 0
    controller: SpeculationController = field(init=False)
    seconds: float = 0.0
    tokens: int = 0
    drafted: int = 0

    def __post_init__(self) -> None:
        self.controller = SpeculationController(self.most)
        self.estimates = [self.controller.new_estimate() for _ in range(self.rows)]
        self.rng = random.Random(self.seed)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            lengths = self.controller.lengths(self.estimates)
            drafted, right = sum(lengths), 0
            for estimate, length in zip(self.estimates, lengths, strict=True):
                hits = next((n for n in range(length) if self.rng.random() >= self.right), length)
                right += hits
                if length:
                    self.controller.record_draft(estimate, length, hits)
            seconds = (
                (1.4 if self.slow > 0 else 1.0)
                + self.token * drafted
                + (self.fixed if drafted else 0.0)
            )
            seconds *= 1 + self.noise * (2 * self.rng.random() - 1)
            if drafted:
                self.controller.record_drafted_step(self.rows, drafted, right, seconds)
            else:
                self.controller.record_plain_step(self.rows, seconds)
            self.slow -= 1
            self.seconds += seconds
            self.tokens += self.rows + right
            self.drafted += drafted

    @property
    def gain(self) -> float:
        """Over an engine without drafts."""
        return self.tokens / self.rows / self.seconds


@settings(max_examples=25)
@given(
    rows=st.sampled_from([1, 2, 5, 16]),
    token=st.floats(0, 2),
    right=st.floats(0, 1),
    fixed=st.floats(0, 2),
    noise=st.sampled_from([0.0, 0.05, 0.1]),
    seed=st.integers(0, 1000),
)
def test_it_never_costs_three_percent(
    rows: int, token: float, right: float, fixed: float, noise: float, seed: int
) -> None:
    engine = Engine(rows, token, right, fixed, noise, seed=seed)
    engine.run(600)
    assert engine.gain > 0.97


@pytest.mark.parametrize(
    ("rows", "token", "right", "least"),
    [(1, 0.05, 0.95, 2.8), (1, 0.15, 0.7, 1.3), (8, 0.01, 0.9, 2.3)],
)
def test_what_pays_is_taken(rows: int, token: float, right: float, least: float) -> None:
    engine = Engine(rows, token, right)
    engine.run(1000)
    assert engine.gain > least


def test_a_step_that_costs_as_much_as_it_brings_is_left_out() -> None:
    engine = Engine(32, 1 / 32, 0.5)
    engine.run(1000)
    assert engine.drafted < 0.05 * engine.tokens


def test_a_price_that_was_found_too_low_is_paid_once() -> None:
    """Plain steps that were slow by chance make the first drafts look free, and then all rows draft."""
    engine, steps = Engine(32, 0.03, 0.0, slow=3), 400
    engine.run(steps)
    assert engine.seconds < 1.03 * (steps + 3 * 0.4)


def test_it_comes_back_when_guesses_get_better() -> None:
    engine = Engine(1, 0.1, 0.0)
    engine.run(600)
    before = engine.drafted
    engine.right = 0.95
    engine.run(1500)
    assert engine.drafted > before + 1500


def test_it_goes_off_when_they_get_worse() -> None:
    engine = Engine(1, 0.1, 0.95)
    engine.run(500)
    engine.right, engine.seconds, engine.tokens = 0.0, 0.0, 0
    engine.run(1000)
    assert engine.gain > 0.95  # it gives back some of what it has gained


def test_one_request_that_nobody_guesses_leaves_the_others_theirs() -> None:
    good, bad = AcceptanceEstimate(0.9, 1.0), AcceptanceEstimate(0.7, 1.0)
    for _ in range(10):
        bad.record(3, 0)
    costs = [0.2, 0.4, 0.6, 0.8, 1.0]
    assert good.length(costs) == 5
    tried = 0
    for _ in range(100):
        assert bad.length(costs) == 0
        if bad.should_retry:
            bad.start_retry()
            tried += 1
    assert 0 < tried <= 3


def test_a_draft_is_not_longer_than_what_pays() -> None:
    """Where the last token costs more than the others, as one does for which a matrix has to be read once more."""
    estimate = AcceptanceEstimate(8.0, 10.0)
    assert estimate.length([0.1, 0.2, 0.3, 0.4, 0.5]) == 5
    assert estimate.length([0.1, 0.2, 0.3, 0.4, 1.5]) == 4
    assert (
        estimate.length([0.9, 1.0, 1.1, 1.2, 1.3]) == 5
    )  # the first one costs more than it brings, all of them do not
    controller, estimate, lengths = SpeculationController(5), AcceptanceEstimate(95.0, 100.0), []
    for _ in range(400):
        (drafted,) = controller.lengths([estimate])
        if drafted:
            controller.record_drafted_step(
                1, drafted, drafted, 1 + 0.1 * drafted + (2.0 if drafted == 5 else 0.0)
            )
        else:
            controller.record_plain_step(1, 1.0)
        lengths.append(drafted)
    assert lengths.count(4) > 300  # now and then it is tried again


def test_always_is_always() -> None:
    controller = SpeculationController(4, always=True)
    assert controller.lengths([controller.new_estimate()] * 3) == [4, 4, 4]


def test_a_prompt_of_the_draft_model_is_paid_for() -> None:
    """Steps that only catch up are a loss, and there are none while the account is empty."""
    controller = SpeculationController(5)
    estimate = [controller.new_estimate()]
    caught, steps = 0, 2000
    for _ in range(steps):
        if any(controller.lengths(estimate)):
            controller.record_drafted_step(1, 0, 0, 1.5, catch_up=32)
            caught += 1
        else:
            controller.record_plain_step(1, 1.0)
    assert 0 < 0.5 * caught / steps < 0.03


def requests_one_by_one(
    count: int, prompt: int, output: int, right: float, *, known: float = 0.017
) -> float:
    """The gain over an engine without drafts. A drafted token takes 0.13 of a step, one of those that a draft model has
    to know before it guesses, up to 32 of them in a step, `known`."""
    controller, rng, seconds = SpeculationController(5), random.Random(0), 0.0
    for _ in range(count):
        estimate, due, said = controller.new_estimate(), prompt, 0
        while said < output:
            (length,) = controller.lengths([estimate], [due if due > 2 else 0])
            catch_up = min(due, 32) if length and due > 2 else 0
            drafted = length if due - catch_up <= 2 else 0
            hits = next((n for n in range(drafted) if rng.random() >= right), drafted)
            took = 1 + known * catch_up + 0.13 * drafted
            if length:
                controller.record_drafted_step(1, drafted, hits, took, catch_up=catch_up)
            else:
                controller.record_plain_step(1, took)
            if drafted:
                controller.record_draft(estimate, drafted, hits)
            due = 0 if drafted else due - catch_up + 1
            seconds += took
            said += 1 + hits
    return count * output / seconds


def test_prompts_of_a_draft_model_are_begun_when_all_of_them_can_be_paid_for() -> None:
    assert requests_one_by_one(12, 128, 128, right=0.8) > 1.25
    assert requests_one_by_one(12, 128, 128, right=0.0) > 0.97
    assert requests_one_by_one(12, 1000, 8, right=0.8) > 0.97
