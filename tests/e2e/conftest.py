"""One running stack for all end-to-end tests that only talk to it."""

from collections.abc import Iterator

import openai
import pytest

from e2e.stack import MotetStack


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotetStack]:
    """What `make run` starts: pocket-chat, one process of each kind."""
    with MotetStack(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


@pytest.fixture
def client(stack: MotetStack) -> Iterator[openai.OpenAI]:
    """The official client, told nothing but the address."""
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client
