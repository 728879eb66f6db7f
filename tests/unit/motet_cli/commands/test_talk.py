"""`motet talk` without devices, files of sound and servers: what is heard, written, shown and sent."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
import time
import wave
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest

from motet_cli.commands.devices import RATE
from motet_cli.main import main
from motet_cli.supervision.connection import NatsAccess
from motet_cli.talk.dialogue import Dialogue
from motet_cli.talk.over_socket import render
from motet_cli.talk.playback import Playback, Sink, WavOutput
from motet_cli.talk.schedule import Schedule
from motet_cli.talk.sound import microphone, paced, read_wav
from motet_cli.talk.transcript import Transcript
from motet_gateway.realtime.channel import Channel
from motet_gateway.realtime.server_events import ServerEvents
from motet_gateway.realtime.session_settings import SessionSettings
from motet_media.audio import pcm_bytes
from motet_pipelines.voice.conversation import events
from motet_pipelines.voice.conversation.events import Event
from motet_pipelines.voice.conversation.inputs import AppendAudio, TruncateItem
from motet_pipelines.voice.conversation.settings import ReplySettings
from motet_pipelines.voice.services import SpeechServices
from motet_shared.errors import ConfigError, MotetError, Overloaded, Unavailable, UnknownModel

SECOND = bytes([1, 2]) * RATE
TONE = bytes([9, 9]) * (RATE // 10)


class FakePlayback:
    """A sink that keeps what it is given."""

    def __init__(self) -> None:
        self.heard: list[str | bytes] = []

    def begin(self) -> None:
        self.heard.append("begin")

    async def write(self, pcm: bytes) -> None:
        self.heard.append(pcm)

    async def end(self) -> None:
        self.heard.append("end")

    async def stop(self) -> None:
        self.heard.append("stop")

    async def close(self) -> None:
        self.heard.append("close")


# ------------------------------------------------------------------------------------------ sound
def file_of(pcm: bytes, path: Path, *, rate: int = RATE, channels: int = 1, width: int = 2) -> str:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(rate)
        file.writeframes(pcm)
    return str(path)


def test_a_file_becomes_mono_at_the_rate_of_a_conversation(tmp_path: Path) -> None:
    left, right = b"\x10\x00", b"\x20\x00"
    path = file_of((left + right) * 48, tmp_path / "stereo.wav", channels=2)
    assert read_wav(path) == b"\x18\x00" * 48
    path = file_of(b"\x00\x10" * 4800, tmp_path / "slow.wav", rate=8000)
    assert len(read_wav(path)) == 3 * 9600


def test_files_that_are_no_wav_of_16_bits_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.wav").write_text("no sound at all, and not for want of trying")
    wide = file_of(bytes(300), tmp_path / "wide.wav", width=3)
    for path in (str(tmp_path / "text.wav"), wide, str(tmp_path / "none.wav")):
        with pytest.raises(ConfigError, match="--input"):
            read_wav(path)


async def test_a_recording_is_given_at_its_own_speed_and_then_silence() -> None:
    given: list[bytes] = []
    began = time.monotonic()
    async for piece in paced(b"\x01\x02" * (RATE // 10), lambda: len(given) > 7):
        given.append(piece)
    assert time.monotonic() - began >= 0.15
    assert set(map(len, given)) == {pcm_bytes(20, RATE)}
    assert b"".join(given[:5]) == b"\x01\x02" * (RATE // 10)
    assert not any(b"".join(given[5:]))
    assert len(given) == 8


async def test_a_recorder_is_heard_to_its_end_and_its_failure_is_an_error() -> None:
    program = "import os,sys; os.write(1, bytes([1, 2]) * 1200); sys.exit(%d)"
    heard = [piece async for piece in microphone((sys.executable, "-c", program % 0))]
    assert b"".join(heard) == bytes([1, 2]) * 960  # whole pieces of 20 ms
    with pytest.raises(MotetError, match="exit code 3"):
        async for _ in microphone((sys.executable, "-c", program % 3)):
            pass


# --------------------------------------------------------------------------------------- playback
async def test_playback_knows_what_was_heard() -> None:
    ears = FakePlayback()
    playback = Playback(cast(Sink, ears))
    assert await playback.stop() is None
    await playback.play("a", SECOND)
    await playback.play("b", SECOND)
    await playback.play("b", SECOND)
    await asyncio.sleep(0.05)
    assert 2.5 < playback.remaining < 3
    stopped = await playback.stop()
    assert stopped is not None
    assert stopped[0] == "b"
    assert stopped[1] == 0  # the second item had not begun
    assert not playback.playing
    assert ears.heard == [SECOND, SECOND, SECOND, "stop"]


async def test_a_file_is_in_time_and_cut_where_playing_stops(tmp_path: Path) -> None:
    path = tmp_path / "out.wav"
    output = WavOutput(str(path))
    output.begin()
    await asyncio.sleep(0.2)
    await output.write(SECOND)
    await asyncio.sleep(0.1)
    await output.stop()
    await output.write(TONE)
    await asyncio.sleep(0.15)
    await output.close()
    with wave.open(str(path)) as file:
        pcm = file.readframes(file.getnframes())
    assert len(pcm) == path.stat().st_size - 44
    quiet = len(pcm) - len(pcm.lstrip(b"\0"))
    assert pcm_bytes(200, RATE) <= quiet < pcm_bytes(600, RATE)
    assert pcm.endswith(TONE)
    assert len(pcm) - quiet - len(TONE) >= pcm_bytes(100, RATE)
    assert len(pcm) < pcm_bytes(1000, RATE)  # the second was not played to its end


async def test_without_a_reply_there_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "out.wav"
    output = WavOutput(str(path))
    await output.close()
    output.begin()
    await output.close()
    assert not path.exists()
    with pytest.raises(ConfigError, match="--output"):
        WavOutput(str(tmp_path / "none" / "out.wav"))
    with pytest.raises(ConfigError, match="--output"):
        WavOutput(str(tmp_path))


async def test_actions_run_in_their_order_until_the_rest_is_dropped() -> None:
    done: list[int] = []
    schedule = Schedule()
    for number, seconds in enumerate((0.03, 0.0, 0.03)):
        schedule.add(seconds, done.append, number)
    await asyncio.sleep(0.1)
    assert done == [0, 1, 2]
    schedule.add(0.01, done.append, 3)
    schedule.clear()
    schedule.add(0.0, done.append, 4)
    await asyncio.sleep(0.05)
    assert done == [0, 1, 2, 4]


def test_a_line_belongs_to_one_side() -> None:
    shown = io.StringIO()
    transcript = Transcript(shown)
    transcript.add("you", " two")
    transcript.add("you", " circles")
    transcript.add("model", "")
    transcript.end_line("model")
    transcript.add("model", "Two")
    transcript.interrupt()
    transcript.interrupt()
    transcript.add("model", "Yes.")
    transcript.end_line()
    assert shown.getvalue() == "you › two circles\n    › Two (interrupted)\n    › Yes.\n"


# --------------------------------------------------------------------------------------- dialogue
async def of(*batches: list[Event]) -> AsyncIterator[list[Event]]:
    for batch in batches:
        yield batch


SETTINGS = ReplySettings(model="m")
ITEM = {"id": "reply", "type": "message", "role": "assistant", "content": []}


def reply(*end: Event) -> list[Event]:
    return [
        events.ReplyStarted("r", SETTINGS, True, None),
        events.OutputOpened("r", 0, "speech", ITEM, None),
        events.SpeechDelta("r", 0, SECOND, "never heard"),
        *end,
    ]


async def test_barge_in_stops_playing_and_cuts_the_reply() -> None:
    ears, shown = FakePlayback(), io.StringIO()
    dialogue = Dialogue(Playback(cast(Sink, ears)), Transcript(shown))
    late = events.SpeechDelta("r", 0, SECOND, "too late")
    cancelled = events.ReplyEnded(reply_id="r", status="cancelled", reason="turn_detected")
    barge_in = events.SpeechStarted("u", 0)
    await dialogue.follow(of(reply(), [barge_in, late, cancelled]))  # type: ignore[arg-type]
    assert ears.heard == [SECOND, "stop"]
    dialogue.finish()
    assert "late" not in shown.getvalue()
    assert "never heard" not in shown.getvalue()
    sound = asyncio.create_task(dialogue.hear(paced(b"", lambda: True)))
    given = [one async for one in dialogue.inputs()]
    await sound
    assert len(given) == 1
    assert isinstance(given[0], TruncateItem)
    assert (given[0].item_id, given[0].audio_ms < 500) == ("reply", True)
    assert not dialogue.failures


async def test_sound_waits_until_the_conversation_takes_it() -> None:
    ears = FakePlayback()
    dialogue = Dialogue(Playback(cast(Sink, ears)), Transcript(io.StringIO()))
    hearing = asyncio.create_task(dialogue.hear(paced(TONE, lambda: True)))
    await asyncio.sleep(0.05)
    assert ears.heard == []
    given = [one async for one in dialogue.inputs()]
    await hearing
    assert ears.heard == ["begin"]
    assert b"".join(one.pcm for one in given if isinstance(one, AppendAudio)) == TONE


async def test_errors_are_shown_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    ears, shown = FakePlayback(), io.StringIO()
    dialogue = Dialogue(Playback(cast(Sink, ears)), Transcript(shown))
    failed = events.ReplyEnded(reply_id="r", status="failed", error=Overloaded("all are busy"))
    unheard = events.TranscriptFailed("u", 0, RuntimeError("no words"))
    await dialogue.follow(of(reply(failed), [unheard]))  # type: ignore[arg-type]
    assert dialogue.failures == 2
    assert capsys.readouterr().err == "error: all are busy\nerror: no words\n"


async def test_a_dialogue_is_over_when_nothing_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("motet_cli.talk.dialogue.SETTLED", 0.02)
    dialogue = Dialogue(Playback(cast(Sink, FakePlayback())), Transcript(io.StringIO()))
    stop = events.SpeechStopped("u", 9)
    words = events.TranscriptCompleted("u", 0, "hello", 1.0)
    nothing = events.TranscriptCompleted("u", 0, " ", 1.0)
    silent = [event for event in reply() if not isinstance(event, events.SpeechDelta)]
    for said, over in (
        ([events.SpeechStarted("u", 0)], False),
        ([stop], False),
        ([words], False),
        (silent, False),
        ([events.ReplyEnded(reply_id="r", status="completed")], True),
        ([stop], False),
        ([nothing], True),
    ):
        await dialogue.follow(of(said))  # type: ignore[arg-type]
        assert not dialogue.over or over
        await asyncio.sleep(0.04)
        assert dialogue.over is over


# --------------------------------------------------------------------------------------- a socket
def rendered(*told: Event) -> list[Event]:
    """Events as a client of the gateway gets them."""
    tenant = Mock(as_rate_limits=list)
    server = ServerEvents(Channel(Mock(), 1 << 20, 30.0), tenant, dict)
    sent = [json.loads(text) for event in told for text in server.render(event)]
    return [event for one in sent if (event := render(one, "m")) is not None]


def test_events_come_back_from_a_socket_as_they_were() -> None:
    speech = SpeechServices("ears", True, "voice")
    labelled = ReplySettings(model="m", label=SessionSettings.default("m", speech, "realtime"))
    item = {**ITEM, "content": [{"type": "output_audio", "transcript": "Two."}]}
    told: list[Event] = [
        events.SpeechStarted("u", 120),
        events.SpeechStopped("u", 900),
        events.TranscriptDelta("u", 0, "two"),
        events.TranscriptCompleted("u", 0, "two circles", 0.78),
        events.OutputOpened("r", 0, "speech", ITEM, None),
        events.SpeechDelta("r", 0, b"\1\2\3\4", ""),
        events.SpeechDelta("r", 0, b"", "Two."),
    ]
    started = events.ReplyStarted("r", labelled, True, None)
    closed = events.OutputClosed("r", 0, item, None)
    ended = events.ReplyEnded(
        reply_id="r", status="cancelled", reason="turn_detected", items=[item]
    )
    assert rendered(started, *told, closed, ended) == [
        events.ReplyStarted("r", SETTINGS, True, None),
        *told,
        ended,
    ]


def test_errors_come_back_from_a_socket_by_their_code() -> None:
    speech = SpeechServices("ears", True, "voice")
    labelled = ReplySettings(model="m", label=SessionSettings.default("m", speech, "realtime"))
    error = UnknownModel("model 'x' does not exist here", param="model")
    failed = events.ReplyEnded(reply_id="r", status="failed", error=error)
    started = events.ReplyStarted("r", labelled, True, None)
    back = rendered(events.TranscriptFailed("u", 0, error), started, failed, events.Failed(error))
    for event in (back[0], back[2], back[3]):
        found = cast(Any, event).error
        assert (type(found), found.code) == (UnknownModel, "model_not_found")


# ------------------------------------------------------------------------------------- exit status
@pytest.mark.parametrize("fails", [True, False], ids=["failed", "raised"])
@pytest.mark.parametrize("signals", [0, 1, 2])
def test_ctrl_c_ends_with_status_0_whatever_failed(
    signals: int,
    fails: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C once, or again during the clean-up, which then runs to its end and raises; or not at all."""
    cleaned: list[Dialogue] = []

    async def conversation(
        args: Any, dialogue: Dialogue, options: Any
    ) -> AsyncGenerator[list[Event], None]:
        given = dialogue.inputs()
        await anext(given)
        try:
            if fails:
                yield [events.Failed(Overloaded("all are busy"))]
            if signals:
                os.kill(os.getpid(), signal.SIGINT)
            async for _ in given:
                pass
        finally:
            if signals == 2:
                os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.05)
            cleaned.append(dialogue)
            if signals or not fails:
                raise Unavailable("NATS does not answer")

    monkeypatch.setattr("motet_cli.talk.command._conversation", conversation)
    monkeypatch.setattr("motet_cli.talk.dialogue.SETTLED", 0.1)
    said = file_of(TONE, tmp_path / "said.wav")
    status = main(["talk", "--input", said, "--output", str(tmp_path / "heard.wav")])
    assert status == (0 if signals else 1)
    (dialogue,) = cleaned
    assert dialogue.failures == fails
    error = capsys.readouterr().err
    assert ("error: all are busy" in error) is fails
    assert ("NATS does not answer" in error) is (not signals and not fails)


# --------------------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("--temperature", "3"), "--temperature"),
        (("--input", "no.wav"), "--input"),
        (("--input", "in.wav", "--output", "none/out.wav"), "--output"),
        (("--input", "in.wav", "--output", "out.wav", "--nats", "nats://x"), "nats_credentials"),
    ],
)
def test_wrong_arguments_are_refused_by_name(
    args: tuple[str, ...],
    word: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MOTET_NATS_CREDENTIALS", str(tmp_path))
    file_of(SECOND, tmp_path / "in.wav")
    assert main(["talk", *args]) == 2
    assert word in capsys.readouterr().err
    assert not (tmp_path / "out.wav").exists()


def test_the_password_of_a_role_comes_from_its_folder_or_from_that_of_all(tmp_path: Path) -> None:
    (tmp_path / "gateway").mkdir()
    (tmp_path / "gateway" / "gateway").write_text("of-the-gateway\n")
    for folder in (tmp_path, tmp_path / "gateway"):
        found = NatsAccess("nats://x", nats_credentials=str(folder))
        assert found.password("gateway") == "of-the-gateway"
        with pytest.raises(ConfigError):
            found.password("operator")
    assert NatsAccess("nats://x", "one-for-all").password("gateway") == "one-for-all"
