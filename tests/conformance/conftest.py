"""Share one stack of the models that ship among all suites."""

from collections.abc import Iterator

import pytest

from e2e.stack import MotetStack


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotetStack]:
    folder = tmp_path_factory.mktemp("stack")
    models = ("--embed", "pocket-embed", "--draw", "pocket-draw", "--store", str(folder / "store"))
    with MotetStack(folder, *models) as stack:
        stack.wait_until_all_ready()
        yield stack
