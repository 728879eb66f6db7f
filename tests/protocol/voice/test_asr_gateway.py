"""Sound files over HTTP: the official client, a real gateway, a real nats-server and a recognizer with a tiny model."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from motet_shared.messages import Listen, Partial, Segment
from support.checkpoints.asr_checkpoints import noise, tiny_whisper, wav, write_wav
from support.stages.asr_stage import KEY, MODEL, Service, serving

SOUND = wav(noise(7.0, 4))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.mark.filterwarnings(
    "ignore:deprecated:DeprecationWarning"
)  # what the client says of translations
@pytest.mark.long
async def test_the_official_client(folder: Path) -> None:
    """Every format and every way to ask, against one stack."""
    async with serving(folder) as service, service.client() as client:
        file = ("sound.wav", SOUND)
        plain = await client.audio.transcriptions.create(model=MODEL, file=file, language="en")
        assert plain.text
        await _verbose(client, plain.text)
        await _captions(service, plain.text)
        await _events(client, plain.text)
        english = await client.audio.translations.create(
            model=MODEL, file=file, response_format="verbose_json"
        )
        assert (english.language, english.text == plain.text) == ("english", False)
        models = {model.id: model.to_dict() for model in (await client.models.list()).data}
        assert models[MODEL]["kind"] == "transcription"
        await _refusals(service, client)
        await _from_the_terminal(service, plain.text)
        await _live(service)


async def _verbose(client: openai.AsyncOpenAI, text: str) -> None:
    whole = await client.audio.transcriptions.create(
        model=MODEL,
        file=("sound.wav", SOUND),
        language="en",
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    assert whole.text == text
    assert (whole.language, whole.duration) == ("english", 7.0)
    assert whole.segments is not None
    assert whole.words is not None
    assert [segment.id for segment in whole.segments] == list(range(len(whole.segments)))
    assert "".join(segment.text for segment in whole.segments).strip() == text
    assert all(0 <= word.start <= word.end <= 7.0 for word in whole.words)
    assert "".join(word.word for word in whole.words) == "".join(
        "".join(s.text for s in whole.segments).split()
    )
    assert all(segment.avg_logprob < 0 and segment.tokens for segment in whole.segments)


async def _captions(service: Service, text: str) -> None:
    srt = await service.post(file=SOUND, response_format="srt")
    assert srt.headers["content-type"].startswith("text/plain")
    first, times, *_ = srt.text.split("\n")
    assert first == "1"
    assert times[:3] == "00:"
    assert times[8:17] == times[8:9] + times[9:12] + " --> "
    vtt = await service.post(file=SOUND, response_format="vtt")
    assert vtt.text.startswith("WEBVTT\n\n00:00:0")
    assert vtt.text.count("-->") == srt.text.count("-->")
    assert (await service.post(file=SOUND, response_format="text")).text.strip() == text


async def _events(client: openai.AsyncOpenAI, text: str) -> None:
    stream = await client.audio.transcriptions.create(
        model=MODEL, file=("sound.wav", SOUND), language="en", stream=True
    )
    events = [event async for event in stream]
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    segments = [event for event in events if event.type == "transcript.text.segment"]
    assert len(deltas) == len(segments) > 1
    assert events[-1].type == "transcript.text.done"
    assert events[-1].text == "".join(deltas)
    assert events[-1].text.strip() == text
    assert [segment.start for segment in segments] == sorted(segment.start for segment in segments)


async def _refusals(service: Service, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        await client.audio.transcriptions.create(
            model=MODEL, file=("sound.mp3", b"no sound " * 500)
        )
    with pytest.raises(openai.NotFoundError, match="eyes"):
        await client.audio.transcriptions.create(model="eyes", file=("sound.wav", SOUND))
    with pytest.raises(openai.APIStatusError) as large:
        await client.audio.transcriptions.create(model=MODEL, file=("sound.wav", bytes(2 << 20)))
    assert large.value.status_code == 413
    wrong: list[tuple[dict[str, Any], str | None]] = [
        ({"response_format": "xml"}, "response_format"),
        ({"temperature": "hot"}, "temperature"),
        ({"stream": "maybe"}, "stream"),
        ({"stream": "true", "response_format": "srt"}, "response_format"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        (
            {"timestamp_granularities[]": "letter", "response_format": "verbose_json"},
            "timestamp_granularities",
        ),
        ({"chunking_strategy[type]": "level"}, "chunking_strategy"),
        ({"known_speaker_names[]": "me"}, "known_speaker_names"),
        ({"language": "klingon"}, "language"),
        ({"model": ""}, "model"),
    ]
    for fields, param in wrong:
        reply = await service.post(file=SOUND, **fields)
        assert reply.status_code == 400, fields
        assert reply.json()["error"]["param"] == param, reply.text
    assert (await service.post(file=None)).json()["error"]["param"] in ("file", "x")
    assert (await service.post("translations", file=SOUND, language="en")).json()["error"][
        "param"
    ] == "language"
    async with httpx.AsyncClient(
        trust_env=False, headers={"Authorization": f"Bearer {KEY}"}
    ) as http:
        reply = await http.post(f"{service.url}/v1/audio/transcriptions", json={"model": MODEL})
        assert "multipart/form-data" in reply.json()["error"]["message"]
        broken = {"content-type": "multipart/form-data; boundary=x"}
        reply = await http.post(
            f"{service.url}/v1/audio/transcriptions", content=b"--y\r\nnothing", headers=broken
        )
        assert reply.status_code == 400


async def _from_the_terminal(service: Service, text: str) -> None:
    """`motet listen` says the same."""

    def listen(path: Path, *options: str) -> subprocess.CompletedProcess[str]:
        argv = [
            sys.executable,
            "-m",
            "motet_cli",
            "listen",
            "--url",
            service.url,
            *options,
            str(path),
        ]
        env = {**os.environ, "MOTET_API_KEY": KEY, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.run(
            argv, capture_output=True, text=True, env=env, timeout=60, check=False
        )

    path = write_wav(
        Path(os.environ.get("TMPDIR", "/tmp")) / f"motet-{os.getpid()}.wav", noise(7.0, 4)
    )
    try:
        heard = await asyncio.to_thread(listen, path, "--language", "en")
        assert (heard.returncode, heard.stdout.strip()) == (0, text), heard.stderr
        missing = await asyncio.to_thread(listen, path.with_suffix(".none"))
        assert missing.returncode == 2
        assert "FILE" in missing.stderr
    finally:
        path.unlink()


async def _live(service: Service) -> None:
    """The same voice while it is spoken, under the permissions of the gateway."""
    request = Listen(model=MODEL, sample_rate=16_000, language="en", words=True)
    async with service.gateway.bus.open("asr", request) as stream:
        for start in range(44, len(SOUND), 6400):
            await stream.send(SOUND[start : start + 6400])
        await stream.end_input()
        bodies = [body async for body in stream]
    partials, final = [body for body in bodies if isinstance(body, Partial)], bodies[-1]
    assert isinstance(final, Segment)
    assert final.text.startswith(partials[-1].stable if partials else "")
    assert "".join(word for word, _, _ in final.words) == final.text != ""


@pytest.mark.long
async def test_a_killed_recognizer_costs_no_word_and_a_client_that_leaves_costs_no_slot(
    folder: Path,
) -> None:
    sound = wav(noise(9.0, 6))
    async with serving(folder, 2) as service, service.client() as client:
        whole = (
            await client.audio.transcriptions.create(
                model=MODEL, file=("s.wav", sound), language="en"
            )
        ).text
        stream = await client.audio.transcriptions.create(
            model=MODEL, file=("s.wav", sound), language="en", stream=True
        )
        said, killed = "", False
        async for event in stream:
            said += event.delta if event.type == "transcript.text.delta" else ""
            if not killed:
                killed = True
                _kill_the_busy_one(service)
        assert said.strip() == whole
        async with httpx.AsyncClient(
            trust_env=False, headers={"Authorization": f"Bearer {KEY}"}
        ) as http:
            form = {"model": MODEL, "language": "en", "stream": "true"}
            url = f"{service.url}/v1/audio/transcriptions"
            async with http.stream(
                "POST", url, data=form, files={"file": ("s.wav", sound)}
            ) as reply:
                async for line in reply.aiter_lines():
                    if line.startswith("data:"):
                        assert json.loads(line[5:])["type"] == "transcript.text.delta"
                        break
        bus = service.gateway.bus
        await bus.directory.wait_for(
            lambda d: all(not beat.load.get("running", 0) for beat in d.ready("asr")), 10
        )


def _kill_the_busy_one(service: Service) -> None:
    """The one that has our stream open, found by its process id in the heartbeats."""
    directory = service.gateway.bus.directory
    busy = max(directory.ready("asr"), key=lambda beat: directory.outstanding(beat.instance))
    os.kill(busy.pid, signal.SIGKILL)
