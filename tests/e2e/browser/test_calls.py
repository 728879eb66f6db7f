"""Calls over WebRTC: the shipped models hear and speak, to aiortc and to Chromium, and through a lossy network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from playwright.async_api import Page

from e2e.browser.browser import browsing, eventually, microphone
from e2e.stack import MotetStack, until
from motet_pipelines.voice.speak import RATE
from support.clients.call_client import CallClient, calling
from support.media.spoken import silence

pytestmark = [
    pytest.mark.extended("conformance"),
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("pocket"),
]

SENTENCE = "There are two red circles and a blue square."
LONG = "A red circle, a blue square, a green star, a yellow circle and a red square."
HEARD = "conversation.item.input_audio_transcription.completed"
LOSS = 0.05


def spoken(stack: MotetStack, text: str) -> bytes:
    """Return what pocket-tts says, as PCM at 24 kHz."""
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client:
        speech = client.audio.speech.create(
            model="pocket-tts", voice="alloy", input=text, response_format="pcm"
        )
        return speech.content


def session(**more: Any) -> dict[str, Any]:
    hears = {"transcription": {"model": "pocket-asr"}, **more}
    # With them a turn is transcribed as a whole: live words of pocket-asr depend on where it is cut.
    include = ["item.input_audio_transcription.logprobs"]
    inputs = {"audio": {"input": hears}, "include": include}
    return {"type": "realtime", "model": "pocket-chat", **inputs}


def words(text: str) -> list[str]:
    return "".join(char for char in text.lower() if char.isalpha() or char == " ").split()


def loudness(pcm: bytes) -> float:
    return float(np.sqrt(np.mean(np.frombuffer(pcm, "<i2").astype(float) ** 2)))


async def heard(client: CallClient, pcm: bytes) -> str:
    """Speak, and return the transcript."""
    client.speech += silence(300) + pcm
    return str((await client.until(HEARD))[-1]["transcript"])


async def test_a_spoken_turn_and_a_barge_in(pocket: MotetStack) -> None:
    question = spoken(pocket, SENTENCE)
    async with calling(pocket.url, **session()) as client:
        assert words(await heard(client, question)) == words(SENTENCE)
        told = [event["type"] for event in client.events]
        if "output_audio_buffer.stopped" not in told:
            await client.until("output_audio_buffer.stopped")
        told = [event["type"] for event in client.events]
        assert "response.output_audio.delta" not in told
        places = [
            told.index(kind)
            for kind in (
                "response.content_part.added",
                "output_audio_buffer.started",
                "response.done",
                "output_audio_buffer.stopped",
            )
        ]
        assert places == sorted(places)
        assert loudness(bytes(client.heard)) > 100

        client.send("response.create", response={"instructions": f"Say: {LONG}"})
        await client.until("output_audio_buffer.started")
        client.speech += question
        events = await client.until("conversation.item.truncated")
        kinds = [event["type"] for event in events]
        assert kinds.index("input_audio_buffer.speech_started") < kinds.index(
            "output_audio_buffer.cleared"
        )
        cut = events[-1]
        assert cut["audio_end_ms"] > 0
        client.send("conversation.item.retrieve", item_id=cut["item_id"])
        item = (await client.until("conversation.item.retrieved"))[-1]["item"]
        assert item["role"] == "assistant"


async def test_no_word_is_lost_with_the_packets(pocket: MotetStack) -> None:
    pcm = spoken(pocket, SENTENCE)
    assert len(pcm) > RATE  # bytes: half a second
    async with calling(pocket.url, loss=LOSS, **session(turn_detection=None)) as client:
        for _ in range(3):
            client.send("input_audio_buffer.clear")
            await client.until("input_audio_buffer.cleared")
            client.speech += silence(200) + pcm + silence(300)
            await client.spoken()
            client.send("input_audio_buffer.commit")
            transcript = (await client.until(HEARD))[-1]["transcript"]
            assert words(transcript) == words(SENTENCE)
        assert client.relay is not None
        assert 0.02 < client.relay.lost / (client.relay.lost + client.relay.passed) < 0.09


_CALL = """async () => {
  const peer = (window.peer = new RTCPeerConnection());
  window.events = [];
  peer.ontrack = ({ streams }) => {
    const context = new AudioContext();
    const ear = context.createAnalyser();
    context.createMediaStreamSource(streams[0]).connect(ear);
    window.loudest = 0;
    setInterval(() => {
      const samples = new Float32Array(ear.fftSize);
      ear.getFloatTimeDomainData(samples);
      window.loudest = Math.max(window.loudest, ...samples.map(Math.abs));
    }, 25);
    const player = new Audio();
    player.srcObject = streams[0];
    player.play();
  };
  const media = await navigator.mediaDevices.getUserMedia({ audio: { echoCancellation: true } });
  window.track = media.getAudioTracks()[0];
  peer.addTrack(window.track, media);
  const channel = peer.createDataChannel("oai-events");
  channel.onmessage = ({ data }) => window.events.push(JSON.parse(data));
  await peer.setLocalDescription(await peer.createOffer());
  const form = new FormData();
  form.set("sdp", peer.localDescription.sdp);
  form.set("session", JSON.stringify(SESSION));
  const reply = await fetch("/v1/realtime/calls", { method: "POST", body: form });
  await peer.setRemoteDescription({ type: "answer", sdp: await reply.text() });
  window.call = reply.headers.get("location");
  return reply.status;
}"""


async def event(page: Page, kind: str) -> Any:
    return await eventually(page, f"events.find((event) => event.type === '{kind}')")


async def test_chromium_calls(pocket: MotetStack, tmp_path: Path) -> None:
    question = spoken(pocket, SENTENCE)
    args = microphone(tmp_path, silence(1500) + question + silence(500))
    async with browsing(pocket.url, args) as page:
        assert await page.evaluate(_CALL.replace("SESSION", json.dumps(session()))) == 201
        assert words((await event(page, HEARD))["transcript"]) == words(SENTENCE)
        await event(page, "output_audio_buffer.started")
        await event(page, "output_audio_buffer.stopped")
        assert await page.evaluate("loudest") > 0.01
        assert await page.evaluate("track.getSettings().echoCancellation")
        hang_up = "async () => (await fetch(call + '/hangup', { method: 'POST' })).status"
        assert await page.evaluate(hang_up) == 200
        until(lambda: _sockets(pocket) == 0, "the call is over")


def _sockets(stack: MotetStack) -> int:
    with httpx.Client(trust_env=False) as http:
        metrics = http.get(f"{stack.url}/metrics").text
    line = next(line for line in metrics.splitlines() if line.startswith("motet_active_sockets"))
    return int(float(line.split()[-1]))
