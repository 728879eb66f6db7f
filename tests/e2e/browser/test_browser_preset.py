"""`motet up --preset assistant` from a hub on loopback: a spoken turn in Chromium, with tiny weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.async_api import expect

from e2e.browser.browser import browsing, eventually, microphone
from e2e.stack import MotetStack, fetch
from motet_cli.stack_file.presets import PRESETS
from support.checkpoints import tts_checkpoints
from support.media.spoken import say, silence
from support.peers.model_hub import ModelHub, Repository, model_hub

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(600)]

MODELS = Path(__file__).parents[3] / "models"
SAID = "Two red circles and a blue square."
VOICE_MS = 1500  # in which the page opens the microphone


def repository(folder: Path) -> Repository:
    files = (path for path in folder.rglob("*") if path.is_file())
    return Repository({str(path.relative_to(folder)): path.read_bytes() for path in files})


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelHub]:
    """A hub with the names of the preset: a Qwen3, a Whisper and a Phonon, all of them tiny."""
    voice = tts_checkpoints.phonon(
        tmp_path_factory.mktemp("hub") / "voice", sample=True, threshold=0.2
    )
    first = min((voice / "voices").glob("*.safetensors"))
    first.rename(voice / "default-voice.safetensors")  # where the released one has it
    folders = {"llm": MODELS / "pocket-chat", "asr": MODELS / "pocket-asr", "tts": voice}
    with model_hub() as hub:
        hub.repositories = {
            model.name: repository(folders[model.flag]) for model in PRESETS["assistant"].models
        }
        yield hub


@pytest.fixture(scope="module")
def stack(hub: ModelHub, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotetStack]:
    env = {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path_factory.mktemp("huggingface")),
        "HF_HUB_OFFLINE": "0",
    }
    with MotetStack(tmp_path_factory.mktemp("preset"), "--preset", "assistant", env=env) as made:
        yield made


def test_all_models_of_the_preset_serve(stack: MotetStack, hub: ModelHub) -> None:
    served = {
        model["id"]: model["kind"] for model in fetch(f"{stack.url}/v1/models").json()["data"]
    }
    wanted = PRESETS["assistant"]
    assert served.keys() >= {model.name for model in wanted.models}
    assert served[wanted.llm] == "chat"
    assert hub.downloads("default-voice.safetensors") == 1
    voices = fetch(f"{stack.url}/v1/audio/voices").json()["data"]
    assert "default" in {voice["id"] for voice in voices}


async def test_a_spoken_turn_over_it(stack: MotetStack, tmp_path: Path) -> None:
    args = microphone(tmp_path, silence(VOICE_MS) + say(SAID) + silence(1500))
    async with browsing(stack.url, args) as page:
        await page.get_by_role("button", name="Talk", exact=True).click()
        await expect(page.get_by_role("region", name="Spoken conversation")).to_be_visible()
        # A voice of random weights is a noise; its reply may be over before its text is looked at.
        sounds = asyncio.create_task(eventually(page, "loudness() > 0.001"))
        user = page.locator("article.user > p").first
        await expect(user).to_contain_text("red", timeout=60_000)
        await expect(user).to_contain_text("blue square")
        await sounds
        reply = page.locator("article.assistant > .text").first
        await expect(reply).not_to_be_empty()
        await page.get_by_role("button", name="End", exact=True).click()
