"""Share one stack of the models that ship, and a tiny ranker, among all suites."""

from collections.abc import Iterator

import pytest

from e2e.stack import MotetStack
from support.checkpoints import ranking_checkpoints


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotetStack]:
    folder = tmp_path_factory.mktemp("stack")
    ranker = ranking_checkpoints.cross_encoder(folder / "ranker")  # of random weights
    models = ["--embed", "pocket-embed", "--draw", "pocket-draw", "--rank", str(ranker)]
    models += ["--store", str(folder / "store")]
    with MotetStack(folder, *models) as stack:
        stack.wait_until_all_ready()
        yield stack
