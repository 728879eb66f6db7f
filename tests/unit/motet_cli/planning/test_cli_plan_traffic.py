"""Test `motet plan --traffic`: numbers of instances, costs, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from motet_cli.main import main
from support.peers.public_models import KNOWN

PRICES = """
[H100]
price = 3.0

[T4]
price = 0.35

[box]
price = 0.4
prefill_token = 0.0005
decode_step = [[1, 0.01], [32, 0.04]]
kv_tokens = 60000
"""
LOAD = (
    "--duration 40s --input lognormal:300,0.5 --output uniform:20,60 --ttft 1s --itl 60ms".split()
)


@pytest.fixture
def prices(tmp_path: Path) -> list[str]:
    (tmp_path / "prices.toml").write_text(PRICES)
    return ["--prices", str(tmp_path / "prices.toml")]


@pytest.fixture
def llama(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(KNOWN["Llama-3.1-8B"][3]))
    return str(tmp_path)


def plan_json(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main(["plan", *args, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_offers_are_compared_by_cost(
    prices: list[str], llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan_json(capsys, llama, "--traffic", "6", *LOAD, *prices)
    offers = {offer["name"]: offer for offer in found["offers"]}
    costs = [offer["fixed"]["per_million_output"] for offer in found["offers"] if "fixed" in offer]
    assert costs == sorted(costs)
    assert "memory=16.00 GiB: weights" in offers["T4"]["why_not"]
    assert offers["H100"]["speed"] == "0.5 of bounds"
    box = offers["box"]
    assert box["speed"] == "measured"
    assert box["fixed"]["share"] >= 0.99
    assert box["fixed"]["cost_per_hour"] == pytest.approx(box["fixed"]["instances"] * 0.4, rel=0.05)
    assert box["policy"]["target"] == pytest.approx(0.9 * box["streams"])
    assert box["replicas"][0][0] == 0.0
    assert found["traffic"]["rate"] == pytest.approx(6, rel=0.3)
    assert found["slo"] == {"ttft": 1.0, "itl": 0.06, "share": 0.99}
    again = plan_json(capsys, llama, "--traffic", "6", *LOAD, *prices)
    assert again == found, "the same seed"


def test_tables_show_all_offers(
    prices: list[str], llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", llama, "--traffic", "3", *LOAD, *prices]) == 0
    out = capsys.readouterr().out
    for words in (
        "requests/s for 40 s",
        "TTFT ≤ 1 s, ITL ≤ 60 ms",
        "instances",
        "box",
        "1M out",
        "T4: memory",
    ):
        assert words in out


def test_more_traffic_needs_more_instances(
    prices: list[str], llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def boxes(*args: str) -> dict[str, Any]:
        found = plan_json(capsys, llama, *args, *LOAD, *prices)
        return next(offer for offer in found["offers"] if offer["name"] == "box")

    few, many = boxes("--traffic", "2"), boxes("--traffic", "10")
    assert few["fixed"]["instances"] < many["fixed"]["instances"]
    cached = boxes("--traffic", "10", "--cached", "0.8")
    assert cached["fixed"]["instances"] < many["fixed"]["instances"]
    assert (
        boxes("--traffic", "2", "--shape", "bursts")["fixed"]["instances"]
        >= few["fixed"]["instances"]
    )


@pytest.mark.long
def test_large_traffic_is_sampled(
    prices: list[str], llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = plan_json(capsys, llama, "--traffic", "2000", *LOAD, *prices)
    sample = found["traffic"]["sample"]
    assert sample == 4
    assert all(
        offer["fixed"]["instances"] % sample == 0 for offer in found["offers"] if "fixed" in offer
    )


def test_recorded_traffic_is_replayed(
    prices: list[str], llama: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"arrival": 0.2 * i, "tokens": 100 + i, "max_tokens": 20} for i in range(200)]
    (tmp_path / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = plan_json(
        capsys,
        llama,
        "--traffic",
        str(tmp_path / "trace.jsonl"),
        "--speed",
        "2",
        "--ttft",
        "1s",
        *prices,
    )
    assert found["traffic"]["seconds"] == pytest.approx(0.1 * 199)
    assert found["traffic"]["output"] == 20


def test_an_unreachable_slo_is_reported(
    prices: list[str], llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["plan", llama, "--traffic", "2", "--duration", "20s", "--itl", "1us", *prices]) == 1
    )
    assert "box: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--traffic", "2"], "--prices: "),
        (["--traffic", "-1"], "--traffic: '-1'"),
        (["--traffic", "nowhere.jsonl"], "'nowhere.jsonl'"),
        (["--traffic", "2", "--ttft", "soon"], "--ttft: 'soon'"),
        (["--traffic", "2", "--share", "1.5"], "--share: 1.5"),
        (["--traffic", "2", "--cached", "1"], "--cached: 1"),
        (["--traffic", "2", "--efficiency", "0"], "--efficiency: 0"),
        (["--traffic", "2", "--input", "long"], "--input: 'long'"),
        (["--traffic", "0.001", "--duration", "1s"], "--traffic: '0.001'"),
        (["--traffic", "2", "--gpu", "H100"], "--gpu: "),
        (["--traffic", "2", "--memory", "8GB"], "--memory: "),
    ],
)
def test_wrong_options_are_rejected(
    args: list[str], message: str, prices: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [] if message == "--prices: " else prices
    assert main(["plan", "pocket-chat", *args, *given]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no price"),
        ("[H100", "cannot read"),
        ("[H100]\ncost = 1", "unknown field `cost`"),
        ("[H100]\nprice = -1", "Expected `float` >= 0"),
        ("[box]\nprice = 1\nprefill_token = 0.1", "prefill_token and decode_step go together"),
        (
            "[box]\nprice = 1\nprefill_token = 0.1\ndecode_step = [[2, 1.0], [1, 1.0]]",
            "give rising numbers",
        ),
        ("[Z80]\nprice = 1", "'Z80'"),
    ],
)
def test_wrong_prices_are_rejected(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prices.toml").write_text(text)
    args = ["--traffic", "2", "--duration", "10s", "--prices", str(tmp_path / "prices.toml")]
    assert main(["plan", "pocket-chat", *args]) == 2
    assert message in capsys.readouterr().err
