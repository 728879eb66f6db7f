"""Test how `motet top` and `motet trace` render the documents of a gateway."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from motet_cli.commands.top import View, screen
from motet_cli.commands.trace import waterfall
from motet_cli.main import main


def measurement(time: float, **tokens: float) -> dict[str, Any]:
    """Return a document of a stack of decode instances that have computed these many tokens."""
    instances: list[dict[str, Any]] = [
        {
            "role": "decode",
            "instance": f"decode-{name}",
            "state": "ready",
            "models": ["m"],
            "load": {"running": 2.0, "queued": 1.0, "kv_free": 0.25, "batch": 4.0},
            "work": {"done": count, "unit": "tokens/s"},
        }
        for name, count in tokens.items()
    ]
    instances.append(
        {
            "role": "gateway",
            "instance": "gateway-g",
            "state": "draining",
            "models": [],
            "load": {"active": 0.0},
            "work": None,
        }
    )
    replies = {
        "active": 3,
        "window_seconds": 60.0,
        "replies": 10,
        "failed": 1,
        "replies_per_second": 0.5,
        "tokens_per_second": 100.0,
        "first_token_seconds": {"p50": 0.05, "p95": 0.2, "p99": 0.3},
        "between_tokens_seconds": None,
        "good": 0.9,
    }
    return {"time": time, "instances": instances, "replies": replies}


def shown(view: View) -> str:
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(screen(view, "http://x"))
    return console.export_text()


def test_names_fit_80_columns() -> None:
    measurements = [measurement(time) for time in (10.0, 12.0)]
    kinds = (
        ("asr", "× real time"),
        ("decode", "tokens/s"),
        ("diffusion", "pictures/s"),
        ("embedding", "tokens/s"),
    )
    for one_measurement in measurements:
        for role, unit in kinds:
            load = {"running": 12.0, "queued": 104.0, "kv_free": 0.0, "batch": 12.0}
            work = {"done": one_measurement["time"] * 1234.5, "unit": unit}
            one = {
                "role": role,
                "instance": f"{role}-1c3a92cd",
                "state": "draining",
                "load": load,
                "work": work,
            }
            one_measurement["instances"].append({**one, "models": ["pocket-embed"]})
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(screen(View(measurements[1], measurements[0]), ""))
    lines = console.export_text().splitlines()
    for role, _ in kinds:
        (line,) = [line for line in lines if f"{role}-1c3a92cd" in line]
        assert {"draining", "pocket-embed", "12", "104", "100%", "1234.5"} <= set(line.split())
    assert "…" not in "".join(lines)


def test_rates_are_computed_between_two_measurements() -> None:
    view = View(measurement(12.0, a=700.0, b=5.0, c=3.0), measurement(10.0, a=100.0, b=50.0))
    assert view.rates() == {
        "decode-a": 300.0,
        "decode-b": 0.0,
    }  # b began anew; c has not been seen before


def test_cost_per_million_tokens_follows_the_rate() -> None:
    assert View(measurement(1.0), measurement(0.0), price=3.6).per_million() == pytest.approx(10.0)
    assert View(measurement(1.0), measurement(0.0)).per_million() is None
    idle = measurement(1.0)
    idle["replies"]["tokens_per_second"] = 0.0
    assert View(idle, idle, price=3.6).per_million() is None


def test_the_screen_shows_all_figures() -> None:
    text = shown(View(measurement(12.0, a=700.0), measurement(10.0, a=100.0), price=3.6))
    for part in (
        "300.0 tokens/s",
        "75%",
        "p95 200.0 ms",
        "90.0%",
        "10.00 at 3.6 per hour",
        "1 of 10 failed in 60 s",
    ):
        assert part in text
    assert "draining" in text


def test_waterfalls_show_stages_and_first_token() -> None:
    spans = [
        {"name": "gateway", "start": 0.0, "seconds": 1.0},
        {"name": "tokenizer.encode", "start": 0.25, "seconds": 0.5},
    ]
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(waterfall({"total": 1.0, "first": 0.5, "spans": spans}))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert [line.count("█") for line in lines if "█" in line] == [48, 24]
    assert any("  tokenizer.encode" in line and " " * 12 + "█" in line for line in lines)
    assert any(line.strip().startswith("first token") and line.endswith("▏") for line in lines)


def test_wrong_options_are_rejected(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["top", "--every", "0"]) == 2
    assert main(["top", "--json"]) == 2
    assert "--every: 0" in capsys.readouterr().err
