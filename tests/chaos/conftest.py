"""Two of each service, and a model whose text is exact; every test leaves all of them ready for the next."""

import asyncio
from collections.abc import Iterator

import pytest

from chaos.streams import Outcome, Streams, request
from e2e import markov
from e2e.stack import MotetStack

MODEL = "markov"
STREAMS = 16
TOKENS = 300


@pytest.fixture(scope="package")
def chaos_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotetStack]:
    folder = tmp_path_factory.mktemp("chaos")
    model = markov.save(folder / MODEL)
    speech = ("--asr", "none", "--tts", "none")
    with MotetStack(
        folder, "--llm", str(model), "--decode", "2", "--tokenizer", "2", *speech
    ) as stack:
        stack.wait_until_all_ready()
        yield stack


@pytest.fixture(scope="package")
def requests() -> list[dict[str, object]]:
    return [request(number, MODEL, TOKENS) for number in range(STREAMS)]


@pytest.fixture(scope="package")
def undisturbed(chaos_stack: MotetStack, requests: list[dict[str, object]]) -> list[Outcome]:
    """What the streams say when nothing happens to them."""

    async def run() -> list[Outcome]:
        async with Streams(chaos_stack.url, requests) as streams:
            return await streams.finish()

    return asyncio.run(run())


@pytest.fixture
def stack(chaos_stack: MotetStack) -> Iterator[MotetStack]:
    """The stack with everybody ready, before and after."""
    chaos_stack.wait_until_all_ready()
    yield chaos_stack
    chaos_stack.wait_until_all_ready()
