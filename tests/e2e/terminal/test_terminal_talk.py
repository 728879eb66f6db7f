"""`motet talk` over the bus of a stack and over a WebSocket: turns, barge-in, files, devices, Ctrl-C, refusals."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import wave
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from e2e.stack import WAIT_SECONDS, MotetStack, until
from e2e.terminal.terminal import Terminal, environment, motet
from e2e.terminal.test_terminal_speech import PLAYER, RATE, RECORDER, device
from e2e.voice_stack import VoiceStack, voice_stack
from support.media.spoken import say, silence, wav
from support.services.fake_services import words

pytestmark = [pytest.mark.long, pytest.mark.timeout(300), pytest.mark.xdist_group("pocket")]
Way = Literal["bus", "socket"]
WAYS: tuple[Way, ...] = ("bus", "socket")
STORY = " ".join(f"word{number}" for number in range(60))  # 12 s of the scripted voice
BEGIN_S, PAUSE_S = 0.3, 6.0
FIRST, SECOND = "Please tell me a long story.", "Stop, I would like something else."


def run(command: list[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        env=env or environment(),
        check=False,
    )


def alone(tmp_path: Path) -> dict[str, str]:
    """An environment in which no stack of this user is known."""
    return {**environment(), "XDG_RUNTIME_DIR": str(tmp_path / "nothing")}


def talk(stack: VoiceStack, way: Way, *args: str) -> list[str]:
    url = f"http://127.0.0.1:{stack.port}"
    return motet(url, "talk", *(("--nats", stack.nats.url) if way == "bus" else ()), *args)


def credentials(stack: VoiceStack) -> dict[str, str]:
    return {**environment(), "MOTET_NATS_CREDENTIALS": str(stack.nats.credentials)}


def loud(path: Path, step_ms: int = 100) -> list[bool]:
    """Whether there is sound in each step of a file."""
    with wave.open(str(path)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2)
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    step = RATE * step_ms // 1000
    whole = samples[: len(samples) // step * step].reshape(-1, step).astype(np.int32)
    return [bool(value) for value in np.abs(whole).max(axis=1) > 500]


@pytest.mark.parametrize("way", WAYS)
async def test_speech_interrupts_a_reply_which_is_cut_to_what_was_heard(
    way: Way, tmp_path: Path
) -> None:
    said, heard = tmp_path / "said.wav", tmp_path / "heard.wav"
    first = silence(BEGIN_S * 1000) + say(FIRST)
    said.write_bytes(wav(first + silence(PAUSE_S * 1000) + say(SECOND)))
    async with voice_stack() as made:
        made.asr.script = ["tell me a story", "something else"]
        made.tokenizer.reply = lambda request: words(
            STORY if len(made.tokenizer.requests) == 1 else "as you like"
        )
        command = talk(made, way, "--input", str(said), "--output", str(heard))
        done = await asyncio.to_thread(run, command, credentials(made))
        assert (done.returncode, done.stderr) == (0, "")
        requests = [request.messages for request in made.tokenizer.requests]
    lines = done.stdout.splitlines()
    assert lines[0] == "you › tell me a story"
    assert lines[1].startswith("    › word0 ")
    assert lines[1].endswith(" (interrupted)")
    assert lines[2:] == ["you › something else", "    › as you like"]
    # What the model knows of its reply is what was heard: neither all of it nor nothing.
    assert [message["role"] for message in requests[1]] == ["user", "assistant", "user"]
    kept = str(requests[1][1]["content"])
    assert STORY.startswith(kept)
    assert 5 < len(kept.split()) < 55
    shown = lines[1].removeprefix("    › ").removesuffix(" (interrupted)")
    assert abs(len(shown.split()) - len(kept.split())) <= 2
    # The file is in time with the input: silence while the user speaks first, sound until the
    # interruption, silence again, and the second reply.
    sound = loud(heard)
    began = sound.index(True)
    assert began >= 10 * len(first) / 2 / RATE
    stopped = began + sound[began:].index(False)
    assert abs((stopped - began) / 10 - 0.2 * len(kept.split())) < 1.0
    assert any(sound[stopped:])


@pytest.mark.parametrize("way", WAYS)
async def test_a_model_that_hears_needs_no_recognizer(way: Way, tmp_path: Path) -> None:
    said, heard = tmp_path / "said.wav", tmp_path / "heard.wav"
    said.write_bytes(wav(silence(BEGIN_S * 1000) + say(FIRST)))
    async with voice_stack(hearing=True) as made:
        made.tokenizer.reply = lambda request: words("once upon a time")
        command = talk(made, way, "--input", str(said), "--output", str(heard))
        done = await asyncio.to_thread(run, command, credentials(made))
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == "    › once upon a time\n"
        (request,) = made.tokenizer.requests
        assert [message["content"] for message in request.messages] == [[{"type": "audio"}]]
        assert len(request.images) == 1
    assert any(loud(heard))


async def test_a_microphone_is_answered_through_speakers_until_ctrl_c(tmp_path: Path) -> None:
    room, played = tmp_path / "room.pcm", tmp_path / "played.pcm"
    room.write_bytes(silence(300) + say(FIRST))
    env = device(tmp_path / "bin", "arecord", RECORDER.format(sound=str(room), seconds=60))
    device_of(tmp_path / "bin", "aplay", PLAYER.format(sound=str(played)))
    async with voice_stack() as made:
        made.asr.script = ["tell me a story"]
        made.tokenizer.reply = lambda request: words("once upon a time")
        env |= {"MOTET_NATS_CREDENTIALS": str(made.nats.credentials)}
        with Terminal(*talk(made, "bus"), env=env) as terminal:
            seen = await asyncio.to_thread(terminal.expect, "once upon a time\n")
            await asyncio.to_thread(until, lambda: plays(played), "the player has played")
            terminal.interrupt()
            code = await asyncio.to_thread(terminal.wait)
            seen += terminal.seen
    assert code == 0, seen
    assert "Traceback" not in seen
    assert "error:" not in seen


def plays(path: Path) -> bool:
    """Return True if a player has written sound."""
    return path.exists() and any(path.read_bytes())


def device_of(folder: Path, name: str, program: str) -> None:
    """A second program in a folder of devices."""
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{program}")
    path.chmod(0o755)


# ---------------------------------------------------------------------------------- pocket models
@pytest.mark.parametrize("way", WAYS)
def test_the_pocket_models_hold_a_conversation(
    pocket: MotetStack, way: Way, tmp_path: Path
) -> None:
    said, heard = tmp_path / "said.wav", tmp_path / "heard.wav"
    question = say("There is a red circle and a blue square. What do you see?")
    said.write_bytes(wav(silence(500) + question))
    command = motet(pocket.url, "talk", "--input", str(said), "--output", str(heard))
    env = environment() if way == "bus" else alone(tmp_path)
    done = run([*command, "--temperature", "0"], env)
    assert (done.returncode, done.stderr) == (0, "")
    you, reply = done.stdout.splitlines()
    assert you == "you › There is a red circle and a blue square. What do you see?"
    assert reply == "    › A red circle and a blue square."
    assert any(loud(heard))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("option", "value", "word"),
    [("--model", "gpt-99", "pocket-chat"), ("--voice", "x", "ada, ben")],
)
def test_a_refusal_leaves_no_file(
    pocket: MotetStack, way: Way, option: str, value: str, word: str, tmp_path: Path
) -> None:
    said, heard = tmp_path / "said.wav", tmp_path / "heard.wav"
    said.write_bytes(wav(silence(500)))
    files = ("--input", str(said), "--output", str(heard))
    env = environment() if way == "bus" else alone(tmp_path)
    done = run(motet(pocket.url, "talk", *files, option, value), env)
    assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (1, "", False)
    assert word in done.stderr
    assert not heard.exists()
