"""Pictures at vLLM, llama.cpp and Motet's engine: one chain for a model that sees (`chains.py`).

vLLM's classes of such models import torchvision, also on CPUs.
"""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from PIL import Image

from e2e.engines.chains import (
    LONG,
    START,
    Moving,
    Streamed,
    ask,
    needs,
    pythons,
    recorded,
    stream,
    wait_for,
)
from e2e.stack import MotetStack
from recipes.world.pictures import draw_things
from recipes.world.scenes import Thing
from support.media.picture_files import encoded
from support.peers.engine_models import gguf_file, seeing_checkpoint, text_checkpoint
from support.peers.engine_runs import EngineRuns

pytestmark = [pytest.mark.extended("peers"), pytest.mark.timeout(1500)]

MODEL = "pocket-chat"
CHAIN = ("vllm", "llama.cpp", "motet")


def question() -> list[dict[str, Any]]:
    """Return a question about a red circle, in the manner of the model's pictures."""
    thing = Thing(shape="circle", colour="red", size="large")
    picture = Image.fromarray(draw_things([thing], Random(1)))
    url = "data:image/png;base64," + base64.b64encode(encoded(picture)).decode()
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "What do you see?"},
    ]
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="module")
def runs() -> Iterator[EngineRuns]:
    yield from recorded()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotetStack]:
    """A chain in which Motet's engine is the last."""
    if python := pythons().get("vllm"):
        found = subprocess.run([python, "-c", "import torchvision"], check=False)
        if found.returncode:
            pytest.skip("vLLM's environment has no torchvision that can be imported")
    folder = tmp_path_factory.mktemp("pictures")
    gguf = gguf_file(text_checkpoint(folder / "pocket-text"))
    arguments = {
        "vllm": "--dtype float32 --enforce-eager --max-num-seqs 2 --max-model-len 2048",
        "llama.cpp": f"gguf={gguf} n_parallel=2",
    }
    text = f'[models.{MODEL}]\nsource = "{seeing_checkpoint(folder / MODEL)}"\n'
    for engine in CHAIN:
        if engine == "motet" or engine in pythons():
            text += f'[[models.{MODEL}.targets]]\nname = "{engine}"\nengine = "{engine}"\n'
        if engine in pythons():
            text += f'engine_python = "{pythons()[engine]}"\n'
            text += f"engine_args = {json.dumps(arguments[engine])}\n"
    (folder / "motet.toml").write_text(text)
    options = ("--config", str(folder / "motet.toml"), "--vad", "0", "--asr", "none")
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
    with MotetStack(folder, *options, "--tts", "none", env=env, start_seconds=START) as stack:
        for engine in pythons():
            wait_for(stack, engine, MODEL)
        yield stack


@pytest.mark.parametrize("engine", CHAIN)
def test_pictures(stack: MotetStack, runs: EngineRuns, engine: str) -> None:
    """What sees answers alike, and counts the picture's tokens alike; llama.cpp has no projector here."""
    needs(engine)
    answer = ask(stack, engine, model=MODEL, messages=question())
    if engine == "llama.cpp":
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == (
            "unsupported_parameter",
            "messages[0].content[0].image_url",
        )
        runs.note("pictures", engine, "refused: no projector")
        return
    assert answer.headers["motet-served-by"] == engine
    found, due = answer.json(), ask(stack, "motet", model=MODEL, messages=question()).json()
    text = found["choices"][0]["message"]["content"]
    assert text == due["choices"][0]["message"]["content"]
    assert "red circle" in text
    assert found["usage"]["prompt_tokens"] == due["usage"]["prompt_tokens"]
    runs.note("pictures", engine, "yes")


def test_a_reply_about_a_picture_goes_on_at_our_engine(stack: MotetStack, runs: EngineRuns) -> None:
    """llama.cpp, the next target, takes no pictures and is passed over."""
    needs("vllm")
    asked: dict[str, Any] = {"model": MODEL, "messages": question(), "max_tokens": LONG}
    undisturbed = Streamed()
    for _ in stream(stack, undisturbed, target="vllm", ignore_eos=True, **asked):
        pass
    reply = Moving(stack, **asked)
    reply.at_tokens(10)
    reply.kill("vllm")
    reply.finish(undisturbed.ids)
    assert reply.path == ["vllm", "motet"]
    runs.note("`kill -9` in mid-stream: a reply about a picture goes on at Motet's", "vllm", "yes")
