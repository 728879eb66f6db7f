"""`motet say` and `motet listen` at a terminal. Programs of the test's own stand in for speakers and microphone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import av
import pytest

from e2e.stack import ASR_MODEL, VOICE, WAIT_SECONDS, MotetStack
from e2e.terminal.terminal import Terminal, environment, motet
from e2e.voice_stack import voice_stack
from motet_media.audio import duration_ms
from support.media.spoken import say, silence, wav

pytestmark = [pytest.mark.long, pytest.mark.timeout(300), pytest.mark.xdist_group("stack")]
RATE = 24_000
TEXT = "Two red circles and a blue square."

PLAYER = """import pathlib, sys
pathlib.Path({sound!r}).write_bytes(sys.stdin.buffer.read())
"""
# In real time, as a microphone; then it is quiet, or the device is gone.
RECORDER = """import pathlib, sys, time
sound, out, at = pathlib.Path({sound!r}).read_bytes(), sys.stdout.buffer, time.monotonic()
for start in range(0, {seconds} * 48000, 960):
    out.write(sound[start : start + 960].ljust(960, b"\\0"))
    out.flush()
    at += 0.02
    time.sleep(max(0, at - time.monotonic()))
"""


def run(command: list[str], env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        env=env or environment(),
        check=False,
    )


def device(folder: Path, name: str, program: str) -> dict[str, str]:
    """An environment in which `program` is the only thing that plays or records, under this name."""
    folder.mkdir()
    script = folder / name
    script.write_text(f"#!{sys.executable}\n{program}")
    script.chmod(0o755)
    return {**environment(), "PATH": str(folder)}


def heard(path: Path) -> float:
    """Seconds of sound in a file that are no silence from end to end."""
    with av.open(str(path)) as file:
        frames = list(file.decode(audio=0))
    assert any(frame.to_ndarray().any() for frame in frames)
    return sum(frame.samples / frame.sample_rate for frame in frames)


# ------------------------------------------------------------------------------------------------------------- to say
@pytest.mark.parametrize("name", ["said.wav", "said.mp3", "said.ogg", "said.flac"])
def test_speech_is_written_in_the_format_of_the_name(
    speaking: MotetStack, tmp_path: Path, name: str
) -> None:
    done = run(
        motet(speaking.url, "say", "-o", str(tmp_path / name), "--voice", "ben", *TEXT.split())
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert heard(tmp_path / name) > 0


def test_speech_goes_through_a_pipe(speaking: MotetStack, tmp_path: Path) -> None:
    with (tmp_path / "said.pcm").open("wb") as out:
        command = motet(speaking.url, "say", "-o", "-")
        subprocess.run(
            command,
            input=TEXT.encode(),
            stdout=out,
            timeout=WAIT_SECONDS,
            env=environment(),
            check=True,
        )
    assert any((tmp_path / "said.pcm").read_bytes())


def test_speech_is_played(speaking: MotetStack, tmp_path: Path) -> None:
    sound = tmp_path / "played.pcm"
    done = run(
        motet(speaking.url, "say", TEXT),
        device(tmp_path / "bin", "aplay", PLAYER.format(sound=str(sound))),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert any(sound.read_bytes())


def test_what_cannot_be_said_is_told_in_words(
    speaking: MotetStack, stack: MotetStack, tmp_path: Path
) -> None:
    broken = device(tmp_path / "bin", "aplay", "raise SystemExit(1)\n")
    nothing = {**environment(), "PATH": str(tmp_path)}
    for command, env, word, code in (
        (motet(speaking.url, "say", TEXT), nothing, "--output", 2),
        (motet(speaking.url, "say", TEXT), broken, "aplay", 1),
        (motet(speaking.url, "say", "-o", "said.xyz", TEXT), None, "xyz", 2),
        (
            motet(speaking.url, "say", "-o", str(tmp_path / "x.wav"), "--voice", "nobody", TEXT),
            None,
            "anna, ben",
            1,
        ),
        (
            motet(speaking.url, "say", "-o", str(tmp_path / "no" / "x.wav"), TEXT),
            None,
            "x.wav",
            2,
        ),
        (motet(stack.url, "say", "-o", str(tmp_path / "x.wav"), TEXT), None, "motet up --tts", 1),
    ):
        done = run(command, env)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
        assert word in done.stderr
        assert not (tmp_path / "x.wav").exists()


# ---------------------------------------------------------------------------------------------------------- to listen
def recorded(path: Path, pcm: bytes) -> Path:
    path.write_bytes(wav(pcm))
    return path


def test_a_file_is_heard(speaking: MotetStack, tmp_path: Path) -> None:
    path = recorded(tmp_path / "said.wav", silence(200) + say(TEXT) + silence(200))
    done = run(motet(speaking.url, "listen", "--model", ASR_MODEL, "--language", "en", str(path)))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
    assert run(motet(speaking.url, "listen", "--translate", str(path))).stdout.strip()


def test_what_was_said_is_heard(speaking: MotetStack, tmp_path: Path) -> None:
    """The two commands behind each other, as in a script."""
    path = tmp_path / "said.wav"
    assert run(motet(speaking.url, "say", "--model", VOICE, "-o", str(path), TEXT)).returncode == 0
    assert run(motet(speaking.url, "listen", str(path))).returncode == 0


def test_what_cannot_be_heard_is_told_in_words(
    speaking: MotetStack, stack: MotetStack, tmp_path: Path
) -> None:
    (tmp_path / "text.wav").write_text("no sound")
    sound = str(recorded(tmp_path / "said.wav", say(TEXT)))
    broken = device(tmp_path / "bin", "arecord", "raise SystemExit(1)\n")
    nothing = {**environment(), "PATH": str(tmp_path)}
    for command, env, word, code in (
        (motet(speaking.url, "listen", "nowhere.wav"), None, "nowhere.wav", 2),
        (motet(speaking.url, "listen"), None, "--mic", 2),
        (motet(speaking.url, "listen", "--mic", sound), None, "--mic", 2),
        (motet(speaking.url, "listen", "--mic", "--translate"), None, "--translate", 2),
        (motet(speaking.url, "listen", "--mic"), nothing, "arecord", 2),
        (motet(speaking.url, "listen", "--mic"), broken, "arecord", 1),
        (motet(speaking.url, "listen", str(tmp_path / "text.wav")), None, "wav", 1),
        (motet(speaking.url, "listen", "--language", "tlh", sound), None, "tlh", 1),
        (motet(stack.url, "listen", sound), None, "motet up --asr", 1),
    ):
        done = run(command, env)
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
        assert word in done.stderr


async def test_a_microphone_is_heard_turn_by_turn_until_ctrl_c(tmp_path: Path) -> None:
    sound = tmp_path / "room.pcm"
    sound.write_bytes(2 * (silence(700) + say(TEXT) + silence(900)) + silence(700) + say(TEXT))
    seconds = round(duration_ms(sound.stat().st_size, RATE) / 1000) + 600
    env = device(tmp_path / "bin", "arecord", RECORDER.format(sound=str(sound), seconds=seconds))
    async with voice_stack() as made:
        made.asr.script = ["two red circles\nand a blue square", "a star", "and what was said last"]
        with Terminal(
            *motet(f"http://127.0.0.1:{made.port}", "listen", "--mic"), env=env
        ) as terminal:
            await asyncio.to_thread(terminal.expect, "Ctrl-C")
            assert await asyncio.to_thread(terminal.expect, "\ntwo red circles and a blue square\n")
            assert await asyncio.to_thread(terminal.expect, "a star\n")
            await asyncio.sleep(3)  # the third turn has begun
            terminal.interrupt()
            assert await asyncio.to_thread(terminal.expect, "and what was said last\n")
            assert await asyncio.to_thread(terminal.process.wait, WAIT_SECONDS) == 0


async def test_a_microphone_that_ends_is_heard_to_its_end(tmp_path: Path) -> None:
    sound = tmp_path / "room.pcm"
    sound.write_bytes(silence(700) + say(TEXT))
    env = device(tmp_path / "bin", "arecord", RECORDER.format(sound=str(sound), seconds=3))
    async with voice_stack() as made:
        made.asr.script = ["two red circles"]
        command = motet(
            f"http://127.0.0.1:{made.port}",
            "listen",
            "--mic",
            "--language",
            "en",
            "--prompt",
            "shapes",
        )
        done = await asyncio.to_thread(run, command, env)
        assert (done.returncode, done.stdout) == (0, "two red circles\n")
        assert (made.asr.requests[0].language, made.asr.requests[0].prompt) == ("en", "shapes")
