"""Test the order in which `motet listen --mic` shows the text of turns."""

from __future__ import annotations

from typing import Any

from motet_cli.commands.live_transcription import Turns


def applied(turns: Turns, kind: str, item_id: str, **fields: Any) -> str:
    return "".join(turns.apply(kind, {"item_id": item_id, **fields}))


def end(turns: Turns) -> str:
    return "".join(turns.end())


def test_text_is_shown_immediately_and_turns_are_lines() -> None:
    turns = Turns()
    assert applied(turns, "delta", "a", delta="two") == "two"
    turns.commit("a")
    assert applied(turns, "delta", "a", delta=" circles") == " circles"
    assert applied(turns, "completed", "a", transcript="two circles.") == ".\n"
    assert not turns.finished
    assert end(turns) == ""
    assert turns.finished


def test_later_turns_wait_for_earlier_ones() -> None:
    turns = Turns()
    turns.commit("a")
    turns.commit("b")
    assert applied(turns, "delta", "b", delta="sec") == ""
    assert applied(turns, "delta", "a", delta="first") == "first"
    assert applied(turns, "completed", "b", transcript="second") == ""
    assert end(turns) == ""
    assert not turns.finished
    assert applied(turns, "completed", "a", transcript="first") == "\nsecond\n"
    assert turns.finished


def test_empty_turns_are_not_shown_and_failed_turns_end() -> None:
    turns = Turns()
    assert applied(turns, "completed", "a", transcript="") == ""
    assert applied(turns, "delta", "b", delta="half a") == "half a"
    assert applied(turns, "failed", "b", error={}) == "\n"


def test_uncommitted_items_are_not_awaited() -> None:
    turns = Turns()
    assert applied(turns, "delta", "a", delta="m") == "m"
    turns.commit("b")
    assert end(turns) == "\n"
    assert applied(turns, "completed", "b", transcript="yes") == "yes\n"
    assert turns.finished
