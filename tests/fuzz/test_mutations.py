"""The fuzzer's own yardstick: its damage follows from its seed, and reaches what it should."""

from __future__ import annotations

import random
from collections import Counter

import msgpack

from fuzz.mutations import Fuzzer, packed
from fuzz.specimens import Specimens
from motet_shared.errors import BadRequest
from motet_shared.messages import (
    BlobRef,
    decode_controls,
    decode_feeds,
    decode_frames,
    decode_heartbeat,
)
from motet_shared.wire import subjects
from motet_shared.wire.call import read_open

REF = BlobRef("shm", "here", "key", 10)
CALLER, WORKER = "gateway-0000beef", "decode-0000beef"


def specimens(seed: int = 0) -> Specimens:
    return Specimens([CALLER], [WORKER], "tiny", REF, REF, random.Random(seed))


def test_there_is_a_specimen_of_every_message() -> None:
    assert not specimens().missing(), "add one to `specimens.py`: what has none is not fuzzed"


def test_what_is_not_damaged_can_be_read() -> None:
    made = specimens()
    for _ in range(50):
        read_open(packed(made.of(subjects.operation("decode", "generate"))))
        read_open(packed(made.of(subjects.open_at(WORKER))))
        decode_controls(packed(made.of(subjects.control_at(WORKER))))
        decode_feeds(packed(made.of(subjects.feeds_to(WORKER))))
        decode_frames(packed(made.of(subjects.frames_to(CALLER))))
        decode_frames(packed(made.of(subjects.open_reply(CALLER, 3))))
        decode_heartbeat(packed(made.of(subjects.heartbeat(WORKER))))


def test_the_same_seed_does_the_same_damage() -> None:
    value = specimens().of(subjects.frames_to(CALLER))
    before = msgpack.packb(value)
    first, again, other = ([Fuzzer(seed).message(value) for _ in range(20)] for seed in (1, 1, 2))
    assert first == again != other
    assert msgpack.packb(value) == before, "the specimen itself is left as it is"


def test_some_damage_is_noticed_and_some_is_not() -> None:
    """Were all refused at the first byte, nothing behind that would be reached."""
    made, fuzzer = specimens(), Fuzzer(3)
    fates = Counter(
        _fate(fuzzer.message(made.of(subjects.operation("decode", "generate"))))
        for _ in range(2000)
    )
    assert fates["read"] > 200
    assert fates["malformed_message"] > 500
    assert fates["protocol_mismatch"] > 10


def _fate(data: bytes) -> str:
    try:
        read_open(data)
    except BadRequest as error:
        return error.code
    return "read"
