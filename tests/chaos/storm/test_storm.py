"""A storm in its short form: no question is lost, answered wrongly or twice, and nothing is left behind.

`MOTET_CHAOS_SECONDS` says how long it lasts, `MOTET_CHAOS_SEED` which one it is. The long form:
`make extended PART=storm`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from chaos.storm.account import Account, Blow, Resources
from chaos.storm.check import Answer, Report
from chaos.storm.storm import Storm, run

pytestmark = pytest.mark.long

SECONDS = float(os.environ.get("MOTET_CHAOS_SECONDS", "40"))
SEED = int(os.environ.get("MOTET_CHAOS_SEED", "83"))
EVERY = 10.0  # seconds


@pytest.mark.extended("storm")
@pytest.mark.slow
@pytest.mark.timeout(300 + SECONDS)
async def test_a_storm_changes_no_answer(tmp_path: Path) -> None:
    account = await run(Storm(SEED, SECONDS, EVERY), tmp_path)
    print(account.table())
    assert not account.findings(), f"MOTET_CHAOS_SEED={SEED}\n{account.table()}"
    assert len(account.blows) >= SECONDS / EVERY / 2
    assert {answer.kind for answer in account.answers if answer.verdict == "equal"} == {
        *("chat", "seeing", "speech", "transcript", "conversation", "picture", "embedding"),
        *("film", "spoken"),
    }


def answers(verdict: str, count: int, began: float = 0.0) -> list[Answer]:
    return [Answer("chat", began, began + 1, verdict, "why") for _ in range(count)]


def account(found: list[Answer], **other: object) -> Account:
    rest = {"died": [], "left": [], "growth": {}} | other
    return Account(Report(found), [Blow("kill", "gateway-1", 0.5, 0.6)], **rest)  # type: ignore[arg-type]


def test_a_clean_account_has_no_findings() -> None:
    clean = account(
        answers("equal", 99) + answers("broken", 1), growth={"decode-1": Resources(1 << 20, 2, 1)}
    )
    assert clean.findings() == []
    assert "99.0% completed" in clean.table()


@pytest.mark.parametrize("verdict", ["lost", "changed", "doubled", "wrong"])
def test_one_bad_answer_is_a_finding(verdict: str) -> None:
    assert account(answers("equal", 999) + answers(verdict, 1)).findings() == [f"{verdict}: why"]


def test_what_else_must_not_be_is_found() -> None:
    done = answers("equal", 99)
    assert account(done, died=["asr-1"]).findings() == ["asr-1 died by itself"]
    assert account(done, left=["tts-2: busy"]).findings() == ["left behind: tts-2: busy"]
    grown = Resources(65 << 20, descriptors=33)
    assert account(done, growth={"vad-1": grown}).findings() == [
        f"vad-1 has {65 << 20} more of memory",
        "vad-1 has 33 more of descriptors",
    ]
    assert account(answers("equal", 9) + answers("broken", 1)).findings() == [
        "90.0% completed, at least 99% should be"
    ]
    calm = account(done + answers("broken", 1, began=100.0))
    assert calm.findings() == ["broken off though nothing had happened: chat: why"]


def test_what_a_gateway_dies_of_together_with_the_store_is_counted_apart() -> None:
    found = answers("equal", 9) + answers("broken", 1) + answers("equal", 9, began=100.0)
    blows = [Blow("kill", "gateway-1", 0.5, 0.6), Blow("kill", "fdstore", 0.5, 0.6)]
    apart = Account(Report(found), blows, [], [], {})
    assert apart.completed == 1.0
    assert apart.findings() == []
    assert "store and gateway" in apart.table()
