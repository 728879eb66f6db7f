"""Checkpoint folders of one's own, several at once, one of them broken; and how the command ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM

from e2e.stack import START_SECONDS, WAIT_SECONDS, MotetStack, fetch, until
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.checkpoints.lora_folders import make_adapter
from support.peers.model_hub import ModelHub, Repository, model_hub

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

TEXT_ONLY = ("--asr", "none", "--tts", "none", "--vad", "0")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model that can be served, and one whose weights were cut off."""
    parent = tmp_path_factory.mktemp("models")
    good = tiny_checkpoint("llama", parent / "my-llama")
    broken = tiny_checkpoint("llama", parent / "cut-off")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    return good, broken


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelHub]:
    """A hub with one language model, on loopback."""
    folder = tiny_checkpoint("qwen3", tmp_path_factory.mktemp("hub") / "model")
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    with model_hub(motet__hub_qwen=Repository(files)) as hub:
        yield hub


@pytest.fixture(scope="module")
def own(
    folders: tuple[Path, Path], hub: ModelHub, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MotetStack]:
    good, broken = folders
    home = tmp_path_factory.mktemp("huggingface")
    with MotetStack(
        tmp_path_factory.mktemp("own"),
        "--llm",
        str(good),
        "--llm",
        str(broken),
        "--llm",
        "motet/hub_qwen@main",
        *TEXT_ONLY,
        env={
            "MOTET_REQUEST_TIMEOUT": "20s",
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
        },
        model="my-llama",
    ) as stack:
        yield stack


def test_it_is_served_under_the_name_of_its_folder(own: MotetStack) -> None:
    with openai.OpenAI(base_url=f"{own.url}/v1", api_key="none", max_retries=0) as client:
        chat = [m for m in client.models.list() if getattr(m, "kind", "") == "chat"]
        status = {m.id: getattr(m, "status", "") for m in chat}
        assert status["my-llama"] == "ready"
        assert status["cut-off"] == "starting"
        reply = client.completions.create(
            model="my-llama", prompt=[1, 2, 3], max_tokens=8, temperature=0
        )
        assert reply.usage is not None
        assert reply.usage.completion_tokens == 8


def test_a_model_of_a_hub_is_served_under_its_name_there(own: MotetStack, hub: ModelHub) -> None:
    with openai.OpenAI(base_url=f"{own.url}/v1", api_key="none", max_retries=0) as client:
        until(
            lambda: getattr(client.models.retrieve("motet/hub_qwen"), "status", "") == "ready",
            "the hub's model is served",
            START_SECONDS,
        )
        reply = client.chat.completions.create(
            model="motet/hub_qwen",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=8,
            temperature=0,
        )
    assert reply.model == "motet/hub_qwen"
    assert reply.usage is not None
    assert reply.usage.completion_tokens > 0
    assert hub.downloads("model.safetensors") == 1


def test_a_broken_one_is_named_with_its_reason_and_the_other_runs_on(own: MotetStack) -> None:
    until(lambda: "decode-2 ended" in own.log(), "its end is reported", START_SECONDS)
    said = own.log().split("decode-2 ended", 1)[1][:3000]
    assert "exit code 78" in said
    assert "safetensors" in said.lower()
    broken = own.child("decode-2")
    assert (broken["state"], broken["restarts"]) == ("failing", 0)
    assert own.child("decode-1")["restarts"] == 0
    with openai.OpenAI(base_url=f"{own.url}/v1", api_key="none", max_retries=0) as client:
        assert client.completions.create(model="my-llama", prompt=[1, 2, 3], max_tokens=2).choices
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(model="cut-off", prompt=[1, 2, 3], max_tokens=2)
        assert caught.value.status_code in (503, 504)


def test_the_port_is_taken(own: MotetStack, folders: tuple[Path, Path]) -> None:
    port = own.url.rpartition(":")[2]
    command = [sys.executable, "-m", "motet_cli", "up", "--port", port, "--llm", str(folders[0])]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=WAIT_SECONDS, env=own.env, check=False
    )
    assert done.returncode == 2
    assert f"{port} on 127.0.0.1 is in use" in done.stderr
    assert not done.stdout


def test_adapters_are_models_with_a_parent(folders: tuple[Path, Path], tmp_path: Path) -> None:
    good, _ = folders
    model = AutoModelForCausalLM.from_pretrained(good, dtype=torch.float32)
    adapter = make_adapter(model, tmp_path / "adapter", strength=0.5)
    options = (
        "--llm",
        str(good),
        "--adapter",
        f"polite={adapter}",
        "--decode",
        "2",
        "--prefill",
        "1",
        *TEXT_ONLY,
    )
    with (
        MotetStack(tmp_path, *options) as stack,
        openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0) as client,
    ):
        until(
            lambda: "polite" in [m.id for m in client.models.list()],
            "the adapter is listed",
            START_SECONDS,
        )
        assert getattr(client.models.retrieve("polite"), "parent", "") == "my-llama"
        wish: dict[str, Any] = {"prompt": list(range(40)), "max_tokens": 12, "temperature": 0}
        said = {
            name: client.completions.create(model=name, **wish).choices[0].text
            for name in ("my-llama", "polite")
        }
        assert said["my-llama"] != said["polite"]
        for name in ("polite", "my-llama", "polite"):
            assert client.completions.create(model=name, **wish).choices[0].text == said[name]
        listed = subprocess.run(
            [sys.executable, "-m", "motet_cli", "models", "--url", stack.url],
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            env=stack.env,
            check=True,
        )
        assert "polite  (adapter of my-llama, ready)" in listed.stdout


@pytest.mark.parametrize(
    ("number", "options"), [(signal.SIGINT, ()), (signal.SIGTERM, TEXT_ONLY)], ids=["all", "text"]
)
def test_a_signal_ends_everything_in_order(
    number: signal.Signals, options: tuple[str, ...], folders: tuple[Path, Path], tmp_path: Path
) -> None:
    with MotetStack(tmp_path, "--llm", str(folders[0]), *options) as stack:
        assert stack.stop(number) == 0
        assert not stack.leftovers()
        assert "Traceback" not in stack.log()
        assert "killed" not in stack.log()


def test_a_key_is_asked_for(folders: tuple[Path, Path], tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sesame\n")
    with MotetStack(
        tmp_path,
        *("--llm", str(folders[0]), "--host", "0.0.0.0", "--api-key-file", str(key)),
        *TEXT_ONLY,
    ) as stack:
        models = f"{stack.url}/v1/models"
        assert fetch(models).status_code == 401
        assert fetch(models, {"Authorization": "Bearer wrong"}).status_code == 401
        assert fetch(models, {"Authorization": "Bearer sesame"}).status_code == 200
        assert "sesame" not in stack.log()
