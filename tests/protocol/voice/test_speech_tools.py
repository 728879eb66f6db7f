"""`motet say --follow`, `motet bench --endpoint speech` and batches of speech, over a real gateway and voice."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet_gateway.audio import speech
from motet_gateway.service import Gateway
from motet_shared.testing import NatsServer, running
from motet_tts.service import Tts
from support.checkpoints import tts_checkpoints
from support.clients.batch_files import begin, jsonl, lines_of, over
from support.running.service_process import python_environment
from support.stages.served_gateway import KEY, Served, served_gateway
from support.stages.tts_stage import MODEL, TEXT, config

URL = "/v1/audio/speech"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway that stores files, and a voice."""
    folder = tts_checkpoints.pocket_tts(tmp_path / "model", sample=True, threshold=0.2)
    async with NatsServer(store=tmp_path / "jetstream") as nats, AsyncExitStack() as stack:
        await stack.enter_async_context(running(Tts(config(folder), await nats.bus("tts"))))
        made = await stack.enter_async_context(served_gateway(nats))
        await made.bus.directory.wait_for(lambda d: d.ready("tts"), 10)
        yield made


async def started(gateway: Gateway, *argv: str, **options: Any) -> asyncio.subprocess.Process:
    environment = python_environment() | {"MOTET_API_KEY": KEY}
    url = Served(gateway).url
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "motet_cli", *argv[:1], *(part.format(url=url) for part in argv[1:]),
        env=environment, **options,
    )  # fmt: skip


async def test_standard_input_is_spoken_while_it_is_written(
    gateway: Gateway, tmp_path: Path
) -> None:
    path = tmp_path / "said.pcm"
    pipes = {"stdin": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    saying = await started(gateway, "say", "--url", "{url}", "--follow", "-o", str(path), **pipes)
    assert saying.stdin is not None
    saying.stdin.write("The blue circle ist schön klein. A".encode())
    async with asyncio.timeout(60):
        while not path.exists() or not path.stat().st_size:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert saying.returncode is None, "the text is not complete yet"
    saying.stdin.write(b"nd so on.")
    saying.stdin.close()
    async with asyncio.timeout(60):
        assert saying.stderr is not None
        assert await saying.stderr.read() == b""
        assert await saying.wait() == 0
    async with Served(gateway).client() as client:
        whole = await client.audio.speech.create(
            model=MODEL,
            voice="",
            input="The blue circle ist schön klein. And so on.",
            response_format="pcm",
        )
    # Another seed: the same words of another length.
    assert path.stat().st_size == pytest.approx(len(whole.content), rel=0.5)


async def test_what_a_server_refuses_is_told(gateway: Gateway, tmp_path: Path) -> None:
    pipes = {"stdin": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    flags = ("--follow", "--voice", "nobody", "-o", str(tmp_path / "x.wav"))
    saying = await started(gateway, "say", "--url", "{url}", *flags, **pipes)
    _, told = await asyncio.wait_for(saying.communicate(b"It is small. And"), 60)
    assert (saying.returncode, b"nobody" in told) == (1, True)
    assert not (tmp_path / "x.wav").exists()


async def test_the_benchmark_measures_speech(gateway: Gateway, tmp_path: Path) -> None:
    report = tmp_path / "run.json"
    flags = ("--endpoint", "speech", "--input", "6", "--requests", "4", "--concurrency", "2")
    more = ("--warmup", "1", "--ttfa", "60s", "--json", str(report), "--records")
    bench = await started(gateway, "bench", "{url}", *flags, *more, stdout=asyncio.subprocess.PIPE)
    shown, _ = await asyncio.wait_for(bench.communicate(), 120)
    assert bench.returncode == 0
    for word in (b"TTFA", b"RTF", b"underruns", b"continuity"):
        assert word in shown
    document = json.loads(report.read_text())
    found, records = document["summary"]["speech"], document["records"]
    assert found["ttfa"]["count"] == found["rtf"]["count"] == len(records) == 4
    assert found["audio_seconds"] == pytest.approx(sum(r["speech"]["audio"] for r in records))
    assert 0 < found["ttfa"]["p50"] <= document["summary"]["e2e"]["max"]
    assert found["rtf"]["min"] > 0
    assert 0 < found["continuity"] <= 1
    assert document["summary"]["goodput"]["requests"] == 4


def line(custom_id: str, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "input": TEXT, "response_format": "pcm", "seed": 5} | fields
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": body}


async def test_a_batch_speaks_its_lines(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech, "MOST_SOUND", 200_000)
    asked = [
        line("pcm"),
        line("mp3", response_format="mp3"),
        line("sse", stream_format="sse"),
        line("voice", voice="nobody"),
        line("long", input="It is small. " * 400, speed=0.25),
    ]
    async with Served(gateway).client() as client:
        made = await begin(client, jsonl(asked), URL)
        done = await over(client, made.id, 200)
        assert done.status == "completed"
        spoken = {
            one["custom_id"]: one["response"]["body"]
            for one in await lines_of(client, done.output_file_id)
        }
        failed = {
            one["custom_id"]: one["response"] for one in await lines_of(client, done.error_file_id)
        }
        whole = await client.audio.speech.create(
            model=MODEL, voice="", input=TEXT, response_format="pcm", extra_body={"seed": 5}
        )
    assert spoken.keys() == {"pcm", "mp3"}
    sounds = [base64.b64decode(spoken["pcm"]["audio_data"]), whole.content]
    one, other = (np.frombuffer(sound, "<i2").astype(np.int32) for sound in sounds)
    assert len(one) == len(other)
    # Lines that are computed together add floats in another order: a step or two of 16 bits.
    assert np.abs(one - other).max() <= 4
    assert spoken["pcm"]["media_type"] == "audio/pcm"
    assert spoken["mp3"]["media_type"] == "audio/mpeg"
    assert len(base64.b64decode(spoken["mp3"]["audio_data"])) > 1000
    for body in spoken.values():
        assert body["object"] == "audio.speech"
        assert [word["word"] for word in body["words"]] == TEXT.split()
        assert body["usage"]["total_tokens"] > 0
    errors = {name: response["body"]["error"] for name, response in failed.items()}
    assert {name: (error["code"], error["param"]) for name, error in errors.items()} == {
        "sse": ("unsupported_parameter", "stream_format"),
        "voice": ("invalid_request", "voice"),
        "long": ("payload_too_large", "input"),
    }
