"""What `motet top` and `motet trace` make of what a gateway tells."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from motet_cli.main import main
from motet_cli.top import View, screen
from motet_cli.trace import waterfall


def seen(time: float, **tokens: float) -> dict[str, Any]:
    """A look at a stack of decode instances that have computed so many tokens."""
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


def test_rates_are_what_was_done_between_two_looks() -> None:
    view = View(seen(12.0, a=700.0, b=5.0, c=3.0), seen(10.0, a=100.0, b=50.0))
    assert view.rates() == {"decode-a": 300.0, "decode-b": 0.0}  # b began anew; c has not been seen before


def test_the_price_of_tokens_is_that_of_the_machines_at_this_rate() -> None:
    assert View(seen(1.0), seen(0.0), price=3.6).per_million() == pytest.approx(10.0)
    assert View(seen(1.0), seen(0.0)).per_million() is None
    idle = seen(1.0)
    idle["replies"]["tokens_per_second"] = 0.0
    assert View(idle, idle, price=3.6).per_million() is None


def test_everything_is_on_the_screen() -> None:
    text = shown(View(seen(12.0, a=700.0), seen(10.0, a=100.0), price=3.6))
    for part in ("300.0 tokens/s", "75%", "p95 200.0 ms", "90.0%", "10.00 at 3.6 per hour", "1 of 10 failed in 60 s"):
        assert part in text
    assert "draining" in text


def test_a_waterfall_has_a_line_for_each_stage_and_one_for_the_first_token() -> None:
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


def test_wrong_options_are_refused_before_anything_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--every", "0"]) == 2
    assert main(["top", "--json"]) == 2
    assert "--every: 0 is not a time" in capsys.readouterr().err
