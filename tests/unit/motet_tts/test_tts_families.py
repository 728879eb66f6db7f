"""What every family does with long texts, speeds, instructions and samples: it follows or refuses by name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from motet_shared.errors import BadRequest
from motet_shared.messages import BlobRef, VoiceSample
from motet_shared.text.sentences import LONGEST, cut
from motet_shared.wire.bus import Bus
from motet_tts.checkpoint import FAMILIES
from motet_tts.service import SAMPLE_SIZES, Tts
from support.checkpoints import tts_checkpoints
from support.running.refusals import refuses
from support.stages.tts_stage import Speech, ask, decoding, said, stage

OWN = "motet_pocket_tts"
POCKET = Path(__file__).resolve().parents[3] / "models" / "pocket-tts"
# Sentences of random weights end where the positions do; those of texts have room for `LONG`.
POSITIONS = {"csm": 400, "dia": 320, "speecht5": 320}
LONG = "It is red. Then, " + "as it is said, it was blue and " * 10 + "so it ends. No?"
LATE = pytest.mark.extended("families", after=2)


@asynccontextmanager
async def speaking(family: str, root: Path) -> AsyncIterator[tuple[Bus, Tts]]:
    options = {"positions": POSITIONS[family]} if family in POSITIONS else {}
    folder = POCKET if family == OWN else tts_checkpoints.MAKERS[family](root / family, **options)
    # Chunks of a tiny model are as short as its frames, those of the released one are not.
    async with stage(folder, chunk=0.32 if family == OWN else 0.05) as (bus, (tts,), hub):
        if family != "llama":
            yield bus, tts
            return
        async with decoding(hub, folder, context=512):
            yield bus, tts


def samples(speech: Speech, sentence: int) -> np.ndarray[Any, np.dtype[np.int16]]:
    return np.frombuffer(
        b"".join(item.data for item in speech.items if item.sentence == sentence), "<i2"
    )


@LATE
@pytest.mark.parametrize("family", sorted(FAMILIES))
async def test_long_texts_have_no_seam(family: str, tmp_path: Path) -> None:
    """Sentences follow each other in order, each begins and ends in silence, and no word is lost."""
    parts = cut(LONG)
    assert len(parts) > 3
    assert max(len(part.text) for part in parts) <= LONGEST
    async with speaking(family, tmp_path) as (bus, tts):
        speech = await said(bus, ask(LONG))
        order = [item.sentence for item in speech.items]
        assert order == sorted(order)
        assert set(order) == set(range(len(parts)))
        assert speech.items[-1].text == len(LONG)
        assert [word for word, _, _ in speech.words] == LONG.split()
        times = [time for _, start, end in speech.words for time in (start, end)]
        assert times == sorted(times)
        for number in range(len(parts)):
            spoken = samples(speech, number)
            assert len(spoken)
            loudest = max(1000, int(abs(spoken).max()))
            assert max(abs(int(spoken[0])), abs(int(spoken[-1]))) < loudest / 20
        tts.check_integrity()


@LATE
@pytest.mark.parametrize("family", sorted(FAMILIES))
async def test_speed_and_instructions(family: str, tmp_path: Path) -> None:
    async with speaking(family, tmp_path) as (bus, tts):
        plain, fast = await said(bus, ask("Red.")), await said(bus, ask("Red.", speed=2.0))
        assert len(fast.pcm) == pytest.approx(len(plain.pcm) / 2, rel=0.1, abs=400)
        (card,) = tts.models()
        if card.instructions:
            whispered = await said(bus, ask("Red.", instructions="a whisper"))
            assert whispered.pcm != plain.pcm
        else:
            with refuses(BadRequest, "instructions"):
                await said(bus, ask("Red.", instructions="a whisper"))
        if not card.clones:
            nowhere = BlobRef(
                "shm", "nowhere", "key", SAMPLE_SIZES[0]
            )  # refused before it is fetched
            with refuses(BadRequest, "voice"):
                await said(bus, ask("Red.", sample=VoiceSample(nowhere, "words")))
        tts.check_integrity()
