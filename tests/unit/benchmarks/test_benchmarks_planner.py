"""Test the benchmark of the planner's simulator, and run one short trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.operation import planner
from benchmarks.operation.planner import QUICK, Figures, Pair, Plan, report, simulated, targets
from benchmarks.support.measures import Target


def test_figures_are_compared_by_trace() -> None:
    real, simulated_figures = Figures(1.0, 2.0, 100.0, 50.0), Figures(1.1, 1.0, 100.0, 60.0)
    pairs = [Pair("steady", 0, 10, 0, 3.0, real, simulated_figures, (2, 3))]
    found = targets(pairs)
    assert [(target.value, target.met) for target in found] == [
        (pytest.approx(0.1), True),
        (pytest.approx(0.5), False),
        (0.0, True),
        (pytest.approx(0.2), True),
        (0, True),
    ]
    assert isinstance(found[0], Target)
    assert "| steady | simulated | 10 | 1,100 | 1,000 | 100.0 | 60 | 3 |" in report(pairs)


@pytest.mark.parametrize("trace", planner.TRACES)
def test_traces_need_more_than_one_instance(trace: str) -> None:
    """Require scaling, so that the traces test the planner."""
    plan = Plan()
    outcome = simulated(plan, plan.traffic(trace, 0), 4.0)
    assert outcome.replicas.most > 1
    assert outcome.unserved == 0


@pytest.mark.extended("peers")
@pytest.mark.slow
def test_a_short_trace_is_run_and_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planner.main(["--quick", "--output", str(tmp_path / "planner.json")])
    written = json.loads((tmp_path / "planner.json").read_text())
    (pair,) = written["findings"]["pairs"]
    assert pair["failed"] == 0
    assert pair["requests"] == len(QUICK.traffic("bursts", 0))
    assert pair["real"]["ttft_p50"] > 0
    # Prompts cannot be prefilled faster than the engine does, and there is one instance at least, all the time.
    assert pair["simulated"]["ttft_p50"] > 0
    for how in ("real", "simulated"):
        assert pair[how]["instance_seconds"] >= 0.9 * (QUICK.seconds - 1)
    assert "bursts" in capsys.readouterr().out
