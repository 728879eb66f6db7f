"""The comparison of screenshots tolerates how letters are smoothed, and nothing that moves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw

from support.running.pictures_compared import TOLERANCE, difference, store


def _screen(shift: int = 0, colour: str = "#3b5bdb") -> Image.Image:
    """Return a button among some lines."""
    picture = Image.new("RGB", (400, 300), "#f5f6fb")
    pen = ImageDraw.Draw(picture)
    for y in range(20, 180, 20):
        pen.text((20, y), "a line of text that is as long as others", fill="#1b1d26")
    pen.rectangle((20 + shift, 220, 120 + shift, 260), fill=colour)
    return picture


def test_the_same_screen_has_no_difference_also_after_it_was_stored(tmp_path: Path) -> None:
    store(_screen(), tmp_path / "folder" / "screen.png")
    with Image.open(tmp_path / "folder" / "screen.png") as stored:
        assert difference(_screen(), stored) == 0


def test_noise_at_edges_is_tolerated() -> None:
    pixels = np.asarray(_screen(), np.int16)
    noise = np.random.default_rng(0).integers(-25, 26, pixels.shape)
    noisy = Image.fromarray(np.clip(pixels + noise, 0, 255).astype(np.uint8))
    assert difference(_screen(), noisy) <= TOLERANCE


@pytest.mark.parametrize("other", [_screen(shift=8), _screen(colour="#b3261e")])
def test_what_moves_or_changes_its_colour_is_a_difference(other: Image.Image) -> None:
    assert difference(_screen(), other) > TOLERANCE


def test_another_size_differs() -> None:
    assert difference(_screen(), _screen().resize((390, 300))) == 1
