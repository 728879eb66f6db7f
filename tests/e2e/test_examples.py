"""Every program of examples/, as its page says to run it, on one stack with the pocket models."""

from __future__ import annotations

import signal
import subprocess
import sys
import wave
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from e2e.stack import WAIT_SECONDS, MotetStack, until
from e2e.terminal.terminal import environment
from recipes.draw.check import detect_things
from support.media.spoken import say, silence, wav
from support.running.node import copy_example, node, package_sources

pytestmark = [pytest.mark.long, pytest.mark.timeout(300), pytest.mark.xdist_group("pocket")]
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SHAPES = "There is a red circle and a blue square."
QUESTION = f"{SHAPES} What do you see?"
SEEN = "A red circle and a blue square."


def variables(stack: MotetStack, role: str = "gateway") -> dict[str, str]:
    """The environment that `motet credentials environment` makes of this one."""
    motet = f"{sys.executable} -m motet_cli credentials environment"
    script = f'eval "$({motet} --url {stack.url} --role {role})"; env -0'
    done = subprocess.run(
        ["bash", "-c", script], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert not done.stderr
    return dict(line.split("=", 1) for line in done.stdout.split("\0") if line)


def run(*command: str | Path, env: dict[str, str] | None = None, code: int = 0) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        env=env or environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def test_the_page_lists_every_example() -> None:
    page = (EXAMPLES / "README.md").read_text()
    files = [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("javascript/*.mjs")]
    assert len(files) >= 7
    for file in files:
        assert f"({file.relative_to(EXAMPLES)})" in page, file


def test_chat_is_a_conversation(pocket: MotetStack) -> None:
    turns = (SHAPES, "What colour is the square?")
    shown = run(sys.executable, EXAMPLES / "chat.py", "--url", pocket.url, *turns).splitlines()
    assert shown[0::2][:2] == [f"you: {turn}" for turn in turns]
    assert "blue" in shown[3].lower()  # it knows the first turn
    assert shown[4].endswith(" tokens")


def test_voice_answers_a_recording(pocket: MotetStack, tmp_path: Path) -> None:
    question, reply = tmp_path / "question.wav", tmp_path / "reply.wav"
    question.write_bytes(wav(silence(500) + say(QUESTION) + silence(300)))
    shown = run(sys.executable, EXAMPLES / "voice.py", question, reply, env=variables(pocket))
    assert shown == f"you: {QUESTION}\nmodel: {SEEN} (completed)\n"
    with wave.open(str(reply)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
    assert len(samples) > 24_000
    assert np.abs(samples.astype(int)).max() > 1000


def test_image_jobs_are_drawn_once(pocket: MotetStack, tmp_path: Path) -> None:
    command: list[str | Path] = [
        sys.executable,
        EXAMPLES / "image_jobs.py",
        "--url",
        pocket.url,
        "--folder",
    ]
    prompts = ("two red circles and a blue square", "a green star")
    run(*command, tmp_path / "first", *prompts)
    files = {path.name: path.read_bytes() for path in (tmp_path / "first").iterdir()}
    assert len(files) == 2
    for path in (tmp_path / "first").iterdir():
        with Image.open(path) as picture:
            assert detect_things(np.asarray(picture.convert("RGB"))).things
    run(*command, tmp_path / "second", *prompts)
    again = {path.name: path.read_bytes() for path in (tmp_path / "second").iterdir()}
    assert again == files  # names of stored pictures are random: they are the same ones
    refused = run(*command, tmp_path / "third", "", code=1)
    assert "RuntimeError" in refused


def test_the_pipeline_draws_and_describes(pocket: MotetStack, tmp_path: Path) -> None:
    idea = "two red circles and a blue square"
    command = (sys.executable, EXAMPLES / "pipeline.py", "--folder", tmp_path, idea)
    words = run(*command, env=variables(pocket))
    with Image.open(tmp_path / "picture.png") as picture:
        things = detect_things(np.asarray(picture.convert("RGB"))).things
    assert len(things) >= 2
    for thing in things:
        assert thing.kind.phrase() in words
    with wave.open(str(tmp_path / "description.wav")) as file:
        assert file.getnframes() > file.getframerate()


def test_the_service_is_found_serves_and_drains(pocket: MotetStack) -> None:
    texts = ["a red circle", "a red square", "nothing like it"]
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "service.py"), "--size", "128"],
        env=variables(pocket, "embedding") | {"MOTET_STOP_WITH_PARENT": "true"},
    )
    try:
        with httpx.Client(base_url=pocket.url, timeout=30, trust_env=False) as http:

            def ask(**fields: object) -> httpx.Response:
                return http.post("/v1/embeddings", json={"model": "hashed-words"} | fields)

            until(lambda: ask(input="a").status_code == 200, "the service is found")
            rows = [one["embedding"] for one in ask(input=texts).json()["data"]]
            vectors = np.array(rows)
            assert vectors.shape == (3, 128)
            near = vectors @ vectors.T
            assert np.allclose(near.diagonal(), 1.0, atol=1e-6)
            assert near[0, 1] > near[0, 2] + 0.3
            assert len(ask(input="a", dimensions=16).json()["data"][0]["embedding"]) == 16
            refused = ask(input="a", dimensions=129)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "dimensions")
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_SECONDS) == 0
            until(lambda: ask(input="a").status_code != 200, "the service is gone")
    finally:
        process.kill()
        process.wait(WAIT_SECONDS)


def test_the_service_needs_the_password_of_its_role(pocket: MotetStack) -> None:
    command = (sys.executable, EXAMPLES / "service.py")
    assert "nats_credentials" in run(*command, env=variables(pocket, "asr"), code=78)


@pytest.mark.parametrize("source", package_sources())
def test_javascript_chats_over_nats(pocket: MotetStack, source: str, tmp_path: Path) -> None:
    chat = copy_example(tmp_path, source) / "chat.mjs"
    env = variables(pocket)
    assert run(node(), chat, QUESTION, env=env) == f"{SEEN}\n"
    refused = run(node(), chat, QUESTION, env=env | {"MOTET_MODEL": "gpt-99"}, code=1)
    assert refused.startswith("model_not_found: ")


# Streams of its own, beside those of chat.mjs: an early end, many at once, and no instance.
SCRIPT = """
import { readFileSync } from "node:fs";
import { Caller } from "./motet.mjs";
const { MOTET_NATS_URL: url, MOTET_NATS_CREDENTIALS: folder } = process.env;
const caller = await Caller.connect({ url, password: readFileSync(`${folder}/gateway`, "utf8").trim() });
const chat = (text) => ({
  type: "chat", model: "pocket-chat", messages: [{ role: "user", content: text }],
  sampling: { temperature: 0 },
});
async function whole(text) {
  let reply = "";
  for await (const [, piece] of caller.open("tokenizer", chat(text))) reply += piece;
  return reply;
}
for await (const body of caller.open("tokenizer", chat(process.argv[2]))) {
  console.log(body[0]);
  break;
}
const replies = await Promise.all(Array.from({ length: 12 }, () => whole(process.argv[2])));
console.log(new Set(replies).size, replies[0]);
try {
  for await (const body of caller.open("speakers", chat("x"))) console.log(body);
} catch (error) {
  console.log(error.code, error.retryable);
}
await caller.close();
"""


@pytest.mark.parametrize("source", package_sources())
def test_javascript_streams_end_early_run_together_and_fail_by_code(
    pocket: MotetStack, source: str, tmp_path: Path
) -> None:
    folder = copy_example(tmp_path, source)
    (folder / "script.mjs").write_text(SCRIPT)
    shown = run(node(), folder / "script.mjs", QUESTION, env=variables(pocket)).splitlines()
    assert shown == ["x", f"1 {SEEN}", "unavailable true"]
