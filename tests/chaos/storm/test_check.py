"""The program that checks a history finds each of what must not be, from the clients' file alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chaos.storm.check import check, main
from chaos.storm.history import History


@pytest.fixture
def made(tmp_path: Path) -> Iterator[History]:
    """A history whose quiet time has said `abcdef` to chat 0 and six bytes to speech 0."""
    history = History(tmp_path / "history.jsonl")
    history.answered(history.asked("chat", 0, quiet=True), "abcdef")
    history.answered(history.asked("speech", 0, quiet=True), b"sounds")
    yield history
    history.close()


def test_each_verdict(made: History) -> None:
    def asked(kind: str = "chat") -> Any:
        return made.asked(kind, 0, quiet=False)

    made.answered(asked(), "abcdef")
    made.answered(asked(), "abcabc")
    made.answered(asked(), "abcabcdef")
    made.answered(asked("speech"), b"sound")
    made.failed(asked(), "unavailable", "abc", retryable=True)
    made.failed(asked(), "unavailable", "abd", retryable=True)
    made.failed(asked(), "internal", None, retryable=False)
    made.failed(asked(), "timeout", None, retryable=False)
    asked()
    twice = asked()
    made.answered(twice, "abcdef")
    made.answered(twice, "abcdef")
    report = check(made.path)
    assert [answer.verdict for answer in report.answers] == [
        *("equal", "changed", "doubled", "changed", "broken", "changed"),
        *("wrong", "lost", "lost", "doubled"),
    ]
    assert len(report.findings()) == 8
    assert report.count("changed", "speech") == 1
    assert main([str(made.path)]) == 1


def test_a_clean_history_has_no_finding(made: History, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        made.answered(made.asked("chat", 0, quiet=False), "abcdef")
    assert main([str(made.path)]) == 0
    assert "FINDING" not in capsys.readouterr().out


def test_a_quiet_time_with_two_answers_or_none_compares_nothing(made: History) -> None:
    made.answered(made.asked("chat", 1, quiet=False), "abcdef")
    with pytest.raises(ValueError, match="chat 1: the quiet time has no answer"):
        check(made.path)
    made.answered(made.asked("chat", 0, quiet=True), "other")
    with pytest.raises(ValueError, match="two answers"):
        check(made.path)


def test_pauses_and_gaps(made: History) -> None:
    """A text pauses between two parts; a sound has a gap when all that has come is played."""
    path = made.path
    made.close()
    lines = [
        {"at": 0.0, "asked": 10, "kind": "chat", "variant": 0, "quiet": False},
        {"at": 0.0, "asked": 11, "kind": "speech", "variant": 0, "quiet": False},
    ]
    due = [json.loads(line) for line in path.read_text().splitlines()]
    chat, speech = (one["digest"] for one in due if "digest" in one)
    pieces = {10: [[1.0, 1], [1.2, 2], [3.2, 3]], 11: [[1.0, 0.5], [1.4, 2.0], [3.3, 4.0]]}
    for number, digest in ((10, chat), (11, speech)):
        lines.append({"at": 9.0, "answered": number, "digest": digest, "pieces": pieces[number]})
    with path.open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    report = check(path)
    assert report.pause_p99 == pytest.approx(2.0)
    assert report.gap_p95 == pytest.approx(0.3)
