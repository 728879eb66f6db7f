"""Test the figures of the benchmarks, and run them at tiny sizes without judging speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.network import routing, session_pauses, sockets
from benchmarks.network.conversations import conversations
from benchmarks.operation import faults, replicas, starts
from benchmarks.operation.faults import Client
from benchmarks.stack.fake_engine import CHARS, MODEL
from benchmarks.stack.fake_prefill import FakePrefill
from benchmarks.stack.load_generator import Arrivals, Report
from benchmarks.stack.stack import motet_stack
from benchmarks.support.measures import Ratio, Target, added_latency, row, rows_table, targets_table
from motet_shared.quantiles import quantile


def test_added_latency_pairs_each_token_with_its_emission() -> None:
    # Two tokens had arrived before the measured time; then one, then two at once.
    stream = Arrivals(request="a", counts=[2, 3, 5], times=[0.5, 1.0, 2.0])
    report = Report(tokens=3, events=2, seconds=1.0, cpu={}, streams=[stream])
    emitted = {"a": [0.1, 0.2, 0.75, 1.0, 1.5], "b": [9.0]}
    assert added_latency(report, emitted) == [0.25, 1.0, 0.5]


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1.0), (0.5, 2.0), (0.75, 3.0), (0.99, 4.0), (1.0, 4.0)]
)
def test_quantiles_are_values_of_the_sample(share: float, expected: float) -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], share) == expected


def test_row_divides_by_tokens_and_seconds() -> None:
    report = Report(tokens=1000, events=250, seconds=2.0, cpu={"gateway": 0.003, "clients": 0.001})
    found = row("saturated", "sse", 4, report)
    assert (found.tokens_per_second, found.tokens_per_event) == (500.0, 4.0)
    assert found.cpu_us == pytest.approx({"gateway": 3.0, "clients": 1.0})
    assert "| saturated | sse | 4 | 500 | 4.0 | 3.00 | 1.00 |" in rows_table([found])


def test_targets_are_upper_or_lower_limits() -> None:
    most, least = Target("cost", 3.1, 3, "µs"), Target("speed", 5.0, 4, "times", most=False)
    assert (most.met, least.met) == (False, True)
    assert "| cost | NO | ≤ 3 µs | 3.10 |" in targets_table([most, least])
    assert Ratio("x", [1.0, 9.0, 5.0]).median == 5.0


@pytest.mark.long
@pytest.mark.parametrize("batched", [True, False])
async def test_stack_streams_to_both_kinds_of_clients(batched: bool) -> None:
    rate = 200.0
    async with motet_stack(rate=rate, batched=batched) as stack:
        for clients in ("sse", "websocket"):
            report = await stack.load(
                clients=clients,
                model=MODEL,
                streams=3,
                settle=0.1,
                seconds=0.3,
                chars=CHARS,
                arrivals=True,
            )
            assert report.tokens >= report.events > 0
            # The gateway joins tokens that came while it was busy.
            assert batched or report.tokens < 1.2 * report.events
            assert set(report.cpu) == {"nats", "engine", "tokenizer", "gateway", "clients"}
            added = added_latency(report, await stack.take_emitted(3))
            assert added
            assert min(added) > 0
        report = await stack.load(clients="one", model=MODEL, max_tokens=1, settle=0, seconds=0.2)
        assert report.durations


def test_fake_prefill_skips_cached_prefixes() -> None:
    prefill = FakePrefill[str](rate=100.0, blocks=8)
    prefill.add("first", list(range(64)))
    prefill.add("second", [*range(48), *range(200, 216)])
    assert prefill.step(0.5) == []
    assert prefill.tokens_left == 14 + 64
    assert prefill.step(0.15) == [("first", 0)]
    assert prefill.step(0.2) == [("second", 48)]
    assert sum(held for _, held in prefill.changes) == 5
    prefill.keep(range(1000, 1128))  # as much as there is room for
    prefill.add("third", list(range(64)))
    prefill.drop("third")
    assert prefill.tokens_left == 0
    prefill.add("fourth", list(range(64)))
    assert prefill.step(1.0) == [("fourth", 0)]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_routing_policies_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    routing.main(
        ["--quick", "--policies", "random", "prefix", "--output", str(tmp_path / "routing.json")]
    )
    assert "| TTFT p50, random / prefix |" in capsys.readouterr().out
    random, prefix = json.loads((tmp_path / "routing.json").read_text())["findings"]["runs"]
    assert len(random["ttft"]) == len(prefix["ttft"]) > 0
    assert random["failed"] == prefix["failed"] == 0
    assert prefix["cached_tokens"] > 0


def test_pauses_end_with_the_gap_after_the_kill() -> None:
    client = Client(began=2)
    client.times = [1.0, 1.1, 1.2, 1.9, 2.0, 3.0]
    assert client.pause_after(1.15) == pytest.approx(
        0.75
    )  # what was on its way came, and then nothing
    assert client.pause_after(1.25) == pytest.approx(0.65)
    assert client.pause_after(1.75) == pytest.approx(
        0.15
    )  # the longest gap begins later: it has another cause
    assert client.pause_after(3.5) == 0.0


@pytest.mark.extended("peers")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_streams_survive_a_killed_worker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults.main(["--quick", "--output", str(tmp_path / "faults.json")])
    assert "| kill -9 |" in capsys.readouterr().out
    [kill] = json.loads((tmp_path / "faults.json").read_text())["findings"]["kills"]
    assert kill["failed"] == 0
    assert len(kill["pauses"]) == kill["failovers"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_numbers_of_workers_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replicas.main(["--quick", "--output", str(tmp_path / "replicas.json")])
    assert "| decode workers |" in capsys.readouterr().out
    runs = json.loads((tmp_path / "replicas.json").read_text())["findings"]["runs"]
    assert [run["workers"] for run in runs] == [1, 2]
    assert all(run["first"] and not run["failed"] for run in runs)


@pytest.mark.long
def test_session_pauses(tmp_path: Path) -> None:
    file = tmp_path / "session_pauses.json"
    session_pauses.main(["--quick", "--output", str(file)])
    found = json.loads(file.read_text())["findings"]
    assert found["broken"] == 0
    assert [len(pauses) for pauses in found["pauses"].values()] == [2, 2]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_sessions_stay_open_and_send_texts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sockets.main(["--quick", "--output", str(tmp_path / "sockets.json")])
    assert "| replies |" in capsys.readouterr().out
    found = json.loads((tmp_path / "sockets.json").read_text())["findings"]
    assert found["broken"] == 0
    assert len(found["first"]) == len(found["last"]) >= 4


def test_conversation_traces_depend_on_their_seed() -> None:
    sizes = {"seconds": 30.0, "rate": 1.0, "vocab": 500, "first_id": 100}
    trace = conversations(3, **sizes)  # type: ignore[arg-type]
    assert trace == conversations(3, **sizes)  # type: ignore[arg-type]
    assert trace != conversations(4, **sizes)  # type: ignore[arg-type]
    assert [c.start for c in trace] == sorted(c.start for c in trace)
    assert len({tuple(c.turns[0].tokens[:400]) for c in trace}) <= 4
    assert all(100 <= token < 500 for c in trace for turn in c.turns for token in turn.tokens)


@pytest.mark.extended("peers")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_starts_are_reported_by_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    starts.main(["--quick", "--output", str(tmp_path / "starts.json")])
    assert "| first chat token |" in capsys.readouterr().out
    [run] = json.loads((tmp_path / "starts.json").read_text())["findings"]["runs"]
    assert {"gateway", "tokenizer", "decode"} <= run["stages"].keys()
    assert 0 < sum(run["stages"]["gateway"].values()) < run["ready"] < run["first_token"]
    assert {"imports", "weights", "packing", "warm-up"} <= run["worker_stages"].keys()
    assert run["worker"] > run["worker_stages"]["imports"] > 0
