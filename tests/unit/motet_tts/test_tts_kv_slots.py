"""Slots of keys and values: what is stored outlives every change of their number and of their length."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from motet_tts.config import EngineConfig
from motet_tts.engine.engine import Engine
from motet_tts.engine.utterance import StepOutput, Utterance
from motet_tts.models.kv_slots import KvSlots

POCKET = Path(__file__).resolve().parents[3] / "models" / "pocket-tts"
LONG = (
    "From left to right there are a small yellow star, a large green circle, an orange square"
    " and a small black triangle."
)
SHORT = "I see a star."


def write(slots: KvSlots, slot: int, count: int) -> Tensor:
    """Write `count` random positions to a slot; return all its keys, `[H, T, D]`."""
    new_BHQD = torch.randn(1, 2, count, 4)
    with torch.inference_mode():
        batch = slots.one(slot, count)
        keys_BHTD, _ = batch.update(new_BHQD, new_BHQD, 0)
        batch.close()
    return keys_BHTD[0].clone()


def keep(slots: KvSlots, count: int) -> None:
    """Free all but the first `count` slots."""
    while len(slots.lengths) > count:
        slots.remove(len(slots.lengths) - 1)


@pytest.mark.parametrize(
    ("most", "left"), [(1, 1), (9, 1), (9, 7), (9, 8), (16, 1), (16, 7), (16, 16)]
)
def test_a_slot_grows_after_others_have_ended(most: int, left: int) -> None:
    slots = KvSlots(torch.device("cpu"))
    before = [write(slots, slots.add(), 100) for _ in range(most)]
    keep(slots, left)
    for slot in range(left):
        now = write(slots, slot, 29)
        assert torch.equal(now[:, :100], before[slot])


def test_slots_grow_in_number_and_length_in_turn() -> None:
    slots = KvSlots(torch.device("cpu"))
    for _ in range(5):
        write(slots, slots.add(), 100)
    for left, longer in ((3, 29), (1, 200)):
        keep(slots, left)
        before = write(slots, 0, 1)
        assert torch.equal(write(slots, 0, longer)[:, : before.shape[1]], before)


def test_a_long_sentence_goes_on_when_short_ones_beside_it_have_ended() -> None:
    """pocket-tts as it ships: the long sentence passes the length of the slots alone."""
    engine = Engine(EngineConfig(model=str(POCKET), max_running=16))

    def add(key: object, text: str) -> None:
        engine.add(key, Utterance(words=tuple(text.split()), voice="ada", seed=7))

    def finish() -> list[StepOutput]:
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        return outputs

    def spoken(outputs: list[StepOutput]) -> int:
        return sum(
            len(one.samples) for one in outputs if one.key == "long" and one.samples is not None
        )

    add("long", LONG)
    alone = finish()
    add("long", LONG)
    for number in range(8):
        add(number, SHORT)
    beside = finish()
    assert [one.error for one in beside if one.error is not None] == []
    assert sum(one.done for one in beside) == 9
    assert spoken(beside) == spoken(alone) > 0
