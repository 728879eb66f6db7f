"""Stacks for the end-to-end tests that only talk to them: chat, speech at random, pocket models; and Docker."""

from collections.abc import Iterator

import openai
import pytest

from containers.engine import Docker, engine, missing
from containers.images import BASE, NoCpuTorch, build_all, import_base
from containers.probe import separation
from e2e import markov
from e2e.stack import ENDLESS, MotetStack, speech


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotetStack]:
    """pocket-chat, as `make run` has it, and beside it a model that never comes to an end by itself; no speech."""
    folder = tmp_path_factory.mktemp("stack")
    endless = markov.save(folder / ENDLESS)
    models = ("--llm", "pocket-chat", "--llm", str(endless), "--asr", "none", "--tts", "none")
    with MotetStack(folder, *models) as stack:
        stack.wait_until_all_ready()
        yield stack


@pytest.fixture(scope="package")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotetStack]:
    """pocket-chat with ears and a voice, which are tiny and have random weights."""
    folder = tmp_path_factory.mktemp("speaking")
    with MotetStack(folder, "--llm", "pocket-chat", *speech(folder)) as stack:
        stack.wait_until_all_ready()
        yield stack


@pytest.fixture(scope="package")
def docker() -> Iterator[Docker]:
    """A Docker engine with the images of compose.yaml, whose containers reach each other."""
    if reason := missing():
        pytest.skip(f"no Docker engine: {reason}")
    with engine() as docker:
        import_base(docker)
        if reason := separation(docker, BASE):
            pytest.skip(reason)
        try:
            build_all(docker)
        except NoCpuTorch as error:
            pytest.skip(str(error))
        yield docker


@pytest.fixture(scope="package")
def pocket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotetStack]:
    """All pocket models as `make run` serves them, with a store for jobs and pictures."""
    folder = tmp_path_factory.mktemp("pocket")
    models = ("--draw", "pocket-draw", "--embed", "pocket-embed", "--store", str(folder / "store"))
    with MotetStack(folder, *models) as stack:
        stack.wait_until_all_ready()
        yield stack


@pytest.fixture
def client(stack: MotetStack) -> Iterator[openai.OpenAI]:
    """The official client, told nothing but the address."""
    with openai.OpenAI(
        base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60
    ) as client:
        yield client
