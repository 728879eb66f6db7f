"""docs/speech.md says what the speech models do; `scripts/list_speech.py` writes it."""

from __future__ import annotations

import pytest

from list_speech import OWN, PAGE, page
from motet_tts.checkpoint import FAMILIES, REFUSED
from support.checkpoints import tts_checkpoints


def test_every_family_has_a_tiny_model_and_a_row() -> None:
    assert FAMILIES.keys() - {OWN} == tts_checkpoints.MAKERS.keys()
    text = PAGE.read_text()
    for kind in [*FAMILIES, *REFUSED]:
        assert text.count(f"| `{kind}` |") == 1, "run scripts/list_speech.py"
    assert not FAMILIES.keys() & REFUSED.keys()


@pytest.mark.long
def test_the_page_is_what_the_script_writes() -> None:
    assert page() == PAGE.read_text(), "run scripts/list_speech.py"
