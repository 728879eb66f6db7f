"""Test transcriptions as captions."""

from __future__ import annotations

import pytest

from motet_gateway.audio.transcript_formats import render
from motet_pipelines.voice.transcribe import TranscriptionOutcome
from motet_shared.messages import Segment


@pytest.mark.parametrize("shape", ["srt", "vtt"])
def test_a_caption_has_no_blank_line(shape: str) -> None:
    """A chat model that hears may write paragraphs; a blank line ends a caption."""
    segments = [
        Segment(0, 0, 0.0, 1.5, " One.\n\n \r\nTwo --> three.\n"),
        Segment(1, 0, 1.5, 2.0, " Four."),
    ]
    body, _ = render(shape, "transcribe", segments, TranscriptionOutcome(), ())
    blocks = body.decode().strip().split("\n\n")
    texts = [block.splitlines()[-2:] for block in blocks if "One" in block or "Four" in block]
    assert texts[0] == ["One.", "Two -> three."]
    assert texts[1][1] == "Four."
    assert len(blocks) == (2 if shape == "srt" else 3)
