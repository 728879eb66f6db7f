"""Checkpoints that tests of a module share."""

import pytest

from support.checkpoints.recognizers import Checkpoints


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Tiny recognizers by `model_type`, written when they are first used."""
    return Checkpoints(lambda kind: tmp_path_factory.mktemp(kind))
