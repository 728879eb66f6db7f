"""SIGKILL of `motet up` itself: its children, NATS among them, end with it."""

import signal
from pathlib import Path

import pytest

from e2e import markov
from e2e.stack import MotetStack, speech, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


def test_no_process_outlives_the_command(tmp_path: Path) -> None:
    model = markov.save(tmp_path / "markov")
    with MotetStack(tmp_path, "--llm", str(model), "--tokenizer", "2", *speech(tmp_path)) as stack:
        roles = {"nats", "gateway", "tokenizer", "decode", "vad", "asr", "tts"}
        until(
            lambda: {child["role"] for child in stack.children() if child["pid"]} == roles,
            "all have begun",
            60,
        )
        stack.signal("decode", signal.SIGSTOP)  # one that could not end itself
        stack.process.kill()
        stack.process.wait()
        until(lambda: not stack.leftovers(), "all children are gone", 10)
