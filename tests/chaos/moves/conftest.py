"""One set of processes for all tests here."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from chaos.moves import world as worlds


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def shared_world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[worlds.World]:
    async with worlds.world(tmp_path_factory.mktemp("moves")) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="package")
async def world(shared_world: worlds.World) -> AsyncIterator[worlds.World]:
    """Everything at rest after each test."""
    yield shared_world
    await shared_world.rest()
