"""Who is to compute a prompt: arithmetic on queues and speeds; and what a worker of another role is started with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from motet_llm.disaggregation.placement import Delay, LocalPrefill, RemotePrefillOffer
from motet_llm.disaggregation.placement import choose as choose_any
from motet_llm.serving.role_change import command_line

IDLE = RemotePrefillOffer("prefill-1", ahead=0, prefill_token=0.001)
BUSY = LocalPrefill(ahead=1000, prefill_token=0.001)
ON_THE_WAY = 1e-5  # seconds per token


def choose(*given: Any) -> str | None:
    choice = choose_any(*given)
    return None if choice is None else choice.instance


def test_a_shorter_queue_elsewhere_is_worth_the_way() -> None:
    assert choose("auto", 500, BUSY, [IDLE], ON_THE_WAY) == "prefill-1"
    assert choose("auto", 500, replace(BUSY, ahead=0), [IDLE], ON_THE_WAY) is None


def test_a_slow_way_is_not_worth_it() -> None:
    assert choose("auto", 500, BUSY, [IDLE], 0.002) is None
    assert choose("auto", 500, BUSY, [replace(IDLE, ahead=2000)], ON_THE_WAY) is None


def test_a_short_prompt_stays() -> None:
    """The way itself takes longer."""
    here = LocalPrefill(ahead=0, prefill_token=0.001, streams=4, slowdown=1.5)
    assert choose("auto", int(Delay.DEFAULT / 0.004), here, [IDLE], ON_THE_WAY) is None
    assert choose("auto", 100, here, [IDLE], ON_THE_WAY) == "prefill-1"


def test_what_asking_costs_is_measured() -> None:
    """A prompt that was worth the guessed delay is not worth the real one; and is tried again when that is long ago."""
    now = 0.0
    delay = Delay(clock=lambda: now)
    here = LocalPrefill(ahead=0, prefill_token=0.001, streams=4, slowdown=1.5)
    assert choose("auto", 100, here, [IDLE], ON_THE_WAY, delay.seconds) == "prefill-1"
    for seconds in (0.3, 0.25, -0.1):
        delay.note(seconds)
    assert delay.seconds == 0.25
    assert choose("auto", 100, here, [IDLE], ON_THE_WAY, delay.seconds) is None
    assert choose("auto", 1000, here, [IDLE], ON_THE_WAY, delay.seconds) == "prefill-1"
    now = Delay.MAX_AGE + 1
    assert delay.seconds == Delay.DEFAULT


def test_what_is_expected_leaves_the_delay_out() -> None:
    choice = choose_any("auto", 500, BUSY, [replace(IDLE, ahead=100)], ON_THE_WAY, 0.5)
    assert choice is not None
    assert choice.seconds == pytest.approx(0.6 + 500 * ON_THE_WAY)


def test_running_streams_make_prompts_leave() -> None:
    """Alone an engine is as quick as another; with streams beside it a prompt would take longer, and hold them up."""
    alone = LocalPrefill(ahead=0, prefill_token=0.001, slowdown=1.8)
    assert choose("auto", 500, alone, [IDLE], 0.0) is None
    assert choose("auto", 500, replace(alone, streams=1), [IDLE], 0.0) == "prefill-1"


def test_the_one_that_is_done_first_gets_it() -> None:
    there = [
        replace(IDLE, ahead=400),
        RemotePrefillOffer("prefill-2", ahead=0, prefill_token=0.0015),
        RemotePrefillOffer("prefill-3", 0, 0.003),
    ]
    assert choose("auto", 500, BUSY, there, ON_THE_WAY) == "prefill-2"
    assert choose("always", 2000, BUSY, there, ON_THE_WAY) == "prefill-1"


def test_an_unknown_speed_is_taken_to_be_that_of_the_others() -> None:
    unknown = replace(IDLE, prefill_token=0.0)
    assert choose("auto", 500, BUSY, [unknown], ON_THE_WAY) == "prefill-1"
    assert choose("auto", 500, replace(BUSY, prefill_token=0.0), [IDLE], ON_THE_WAY) == "prefill-1"
    assert choose("auto", 500, replace(BUSY, prefill_token=0.0), [unknown], ON_THE_WAY) is None


@pytest.mark.parametrize(
    ("policy", "tokens", "there"),
    [("never", 500, [IDLE]), ("always", 0, [IDLE]), ("always", 5, [])],
)
def test_who_is_never_asked(policy: str, tokens: int, there: list[RemotePrefillOffer]) -> None:
    assert choose(policy, tokens, BUSY, there, ON_THE_WAY) is None


def test_always_asks_whatever_it_costs() -> None:
    slow = RemotePrefillOffer("prefill-1", ahead=1e6, prefill_token=1.0)
    assert choose("always", 1, LocalPrefill(0, 1e-6), [slow], 1.0) == "prefill-1"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "m", "--role", "decode", "--threads", "2"],
        ["--role=decode", "--model", "m", "--instance", "decode-1", "--threads", "2"],
        ["--model", "m", "--threads", "2", "--instance=decode-1"],
    ],
)
def test_another_role_has_the_same_settings(arguments: list[str]) -> None:
    line = command_line("prefill", arguments)
    assert line[1:] == ["-m", "motet_llm", "--model", "m", "--threads", "2", "--role", "prefill"]
