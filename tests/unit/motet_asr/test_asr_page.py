"""docs/recognizers.md is what scripts/list_recognizers.py writes."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from list_recognizers import PAGE, page, refused
from motet_asr.models.registry import RECOGNIZERS
from motet_models.image_support import HEARING_TYPES
from support.checkpoints.recognizers import TINY


def test_the_page_is_what_the_registry_says() -> None:
    assert PAGE.read_text() == page(), "run scripts/list_recognizers.py"
    assert TINY.keys() == RECOGNIZERS.keys()
    assert len(RECOGNIZERS) >= 8


def test_only_a_chat_model_with_a_prompt_for_transcription_is_served_by_two_services() -> None:
    kinds = {kind for kind, _ in refused()}
    assert kinds.isdisjoint(RECOGNIZERS)
    assert HEARING_TYPES & RECOGNIZERS.keys() == {"voxtral"}
