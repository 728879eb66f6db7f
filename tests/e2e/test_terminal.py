"""`motet chat` in a pseudo-terminal, and `motet models`."""

from __future__ import annotations

import codecs
import contextlib
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from types import TracebackType

import pytest

from e2e.stack import ENDLESS, WAIT_SECONDS, MotetStack

pytestmark = pytest.mark.timeout(600)
MODEL = "pocket-chat"


class Terminal:
    """A command at a terminal: what is typed, and what is seen."""

    def __init__(self, *command: str) -> None:
        ours, theirs = pty.openpty()
        self._fd = ours
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=environment()
        )
        os.close(theirs)
        self.seen = ""
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._fd)

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt(self) -> None:
        """What a terminal does on Ctrl-C."""
        self.process.send_signal(2)

    def expect(self, *words: str, seconds: float = WAIT_SECONDS) -> str:
        """What was seen up to and with the first of `words`; it is not seen again."""
        give_up = time.monotonic() + seconds
        while not (found := [word for word in words if word in self.seen]):
            if not select.select([self._fd], [], [], max(0.0, give_up - time.monotonic()))[0]:
                raise TimeoutError(f"none of {words} in {self.seen!r}")
            with contextlib.suppress(OSError):  # the command has ended: what was seen is all
                self.seen += self._decode(os.read(self._fd, 65536)).replace("\r\n", "\n")
                continue
            raise EOFError(f"none of {words} in {self.seen!r}")
        before, _, self.seen = self.seen.partition(found[0])
        return before + found[0]


def environment() -> dict[str, str]:
    paths = os.pathsep.join(path for path in sys.path if path)
    return {**os.environ, "PYTHONPATH": paths, "TERM": "dumb"}


def motet(stack: MotetStack, command: str, *args: str) -> list[str]:
    return [sys.executable, "-m", "motet_cli", command, "--url", stack.url, *args]


@pytest.fixture
def dialogue(stack: MotetStack) -> Iterator[Terminal]:
    with Terminal(*motet(stack, "chat", "--model", MODEL)) as terminal:
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
    dialogue.interrupt()
    dialogue.expect("/exit")
    dialogue.expect("you › ")
    dialogue.type("Hello!\n")
    assert "elp" in dialogue.expect("you › ")


def test_ctrl_c_stops_the_answer_not_the_program(stack: MotetStack) -> None:
    with Terminal(*motet(stack, "chat", "--model", ENDLESS)) as terminal:
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
    with Terminal(*motet(stack, "chat", "--model", ENDLESS, "Hello!")) as terminal:
        terminal.expect("ccc")
        terminal.interrupt()
        assert terminal.process.wait(WAIT_SECONDS) == 130


def test_one_question_on_the_command_line(stack: MotetStack) -> None:
    command = motet(
        stack, "chat", "--model", MODEL, "There are two red circles and a blue square. How many circles are there?"
    )
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS, env=environment(), check=True)
    assert "two" in done.stdout.lower()
    assert not done.stderr


def test_one_question_by_pipe(stack: MotetStack) -> None:
    done = subprocess.run(
        motet(stack, "chat", "--model", MODEL),
        input="Hello!\n",
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        env=environment(),
        check=True,
    )
    assert done.stdout.strip()


def test_an_unknown_model_is_said_in_words(stack: MotetStack) -> None:
    command = motet(stack, "chat", "--model", "gpt-99", "Hello!")
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS, env=environment(), check=False)
    assert done.returncode == 1
    assert "gpt-99" in done.stderr
    assert "Traceback" not in done.stderr


def test_models_are_listed(stack: MotetStack) -> None:
    done = subprocess.run(
        motet(stack, "models"), capture_output=True, text=True, timeout=WAIT_SECONDS, env=environment(), check=True
    )
    served, local = done.stdout.split("local folders:")
    assert served.split()[-2:] == [ENDLESS, MODEL]
    assert MODEL in local
    assert ENDLESS not in local
