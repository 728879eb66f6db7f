"""Which text of which turn `motet listen --mic` shows when."""

from __future__ import annotations

from typing import Any

from motet_cli.commands.captions import Turns


def told(turns: Turns, kind: str, item_id: str, **fields: Any) -> str:
    return "".join(turns.note(kind, {"item_id": item_id, **fields}))


def end(turns: Turns) -> str:
    return "".join(turns.end())


def test_text_shows_as_it_comes_and_a_turn_is_a_line() -> None:
    turns = Turns()
    assert told(turns, "delta", "a", delta="two") == "two"
    turns.commit("a")
    assert told(turns, "delta", "a", delta=" circles") == " circles"
    assert told(turns, "completed", "a", transcript="two circles.") == ".\n"
    assert not turns.over
    assert end(turns) == ""
    assert turns.over


def test_a_later_turn_waits_for_the_one_before() -> None:
    turns = Turns()
    turns.commit("a")
    turns.commit("b")
    assert told(turns, "delta", "b", delta="sec") == ""
    assert told(turns, "delta", "a", delta="first") == "first"
    assert told(turns, "completed", "b", transcript="second") == ""
    assert end(turns) == ""
    assert not turns.over
    assert told(turns, "completed", "a", transcript="first") == "\nsecond\n"
    assert turns.over


def test_a_turn_without_words_is_no_line_and_a_failed_one_ends() -> None:
    turns = Turns()
    assert told(turns, "completed", "a", transcript="") == ""
    assert told(turns, "delta", "b", delta="half a") == "half a"
    assert told(turns, "failed", "b", error={}) == "\n"


def test_what_became_no_turn_is_not_waited_for() -> None:
    turns = Turns()
    assert told(turns, "delta", "a", delta="m") == "m"
    turns.commit("b")
    assert end(turns) == "\n"
    assert told(turns, "completed", "b", transcript="yes") == "yes\n"
    assert turns.over
