"""`motet chat` in a pseudo-terminal, and `motet models`."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest

from e2e.stack import ENDLESS, WAIT_SECONDS, MotetStack
from e2e.terminal.terminal import Terminal, environment, motet

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("stack")]
MODEL = "pocket-chat"


@pytest.fixture
def dialogue(stack: MotetStack) -> Iterator[Terminal]:
    with Terminal(*motet(stack.url, "chat", "--model", MODEL)) as terminal:
        terminal.expect("you › ")
        yield terminal


def test_a_dialogue_that_remembers(dialogue: Terminal) -> None:
    dialogue.type("Here is a blue square.\n")
    dialogue.expect("you › ")
    dialogue.type("What colour is the square?\n")
    assert "blue" in dialogue.expect("you › ").lower()
    dialogue.type("/exit\n")
    assert dialogue.process.wait(WAIT_SECONDS) == 0


def test_end_of_input_leaves(dialogue: Terminal) -> None:
    dialogue.type("\x04")
    assert dialogue.process.wait(WAIT_SECONDS) == 0


def test_ctrl_c_at_the_prompt_does_not_leave(dialogue: Terminal) -> None:
    time.sleep(
        1.0
    )  # readline shows a prompt before it waits, and does not notice a signal in between
    dialogue.interrupt()
    dialogue.expect("/exit")
    dialogue.expect("you › ")
    dialogue.type("Hello!\n")
    assert "elp" in dialogue.expect("you › ")


def test_ctrl_c_stops_the_answer_not_the_program(stack: MotetStack) -> None:
    with Terminal(*motet(stack.url, "chat", "--model", ENDLESS)) as terminal:
        terminal.expect("you › ")
        for _ in range(2):
            terminal.type("Hello!\n")
            terminal.expect("Hello!")  # the terminal's echo
            terminal.expect("ccc")  # so it goes on, for as long as one listens
            terminal.interrupt()
            terminal.expect("(stopped)")
            terminal.expect("you › ")
        terminal.type("\x04")
        assert terminal.process.wait(WAIT_SECONDS) == 0


def test_ctrl_c_ends_a_single_answer(stack: MotetStack) -> None:
    with Terminal(*motet(stack.url, "chat", "--model", ENDLESS, "Hello!")) as terminal:
        terminal.expect("ccc")
        terminal.interrupt()
        assert terminal.process.wait(WAIT_SECONDS) == 130


def test_one_question_on_the_command_line(stack: MotetStack) -> None:
    command = motet(
        stack.url,
        "chat",
        "--model",
        MODEL,
        "There are two red circles and a blue square. How many circles are there?",
    )
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_SECONDS, env=environment(), check=True
    )
    assert "two" in done.stdout.lower()
    assert not done.stderr


def test_one_question_by_pipe(stack: MotetStack) -> None:
    done = subprocess.run(
        motet(stack.url, "chat", "--model", MODEL),
        input="Hello!\n",
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        env=environment(),
        check=True,
    )
    assert done.stdout.strip()


def test_an_unknown_model_is_said_in_words(stack: MotetStack) -> None:
    command = motet(stack.url, "chat", "--model", "gpt-99", "Hello!")
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        env=environment(),
        check=False,
    )
    assert done.returncode == 1
    assert "gpt-99" in done.stderr
    assert "Traceback" not in done.stderr


def test_models_are_listed(stack: MotetStack) -> None:
    done = subprocess.run(
        motet(stack.url, "models"),
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        env=environment(),
        check=True,
    )
    served, local = done.stdout.split("local folders:")
    rows = [line.split(maxsplit=1) for line in served.splitlines()[1:] if line.strip()]
    assert rows[-2:] == [[ENDLESS, "(chat, ready)"], [MODEL, "(chat, ready)"]]
    assert MODEL in local
    assert ENDLESS not in local
