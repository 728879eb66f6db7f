"""Sound of calls: lost and late packets, a client's pace, and what was played when it is cut."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest

from motet_gateway.realtime.webrtc.jitter_buffer import OVERTAKING, JitterBuffer
from motet_gateway.realtime.webrtc.microphone import Microphone
from motet_gateway.realtime.webrtc.opus import Decoder, Encoder
from motet_gateway.realtime.webrtc.playback import Playback
from motet_pipelines.voice.conversation.events import (
    OutputClosed,
    OutputOpened,
    ReplyEnded,
    ReplyStarted,
    SpeechDelta,
)
from motet_pipelines.voice.conversation.settings import ReplySettings

RATE = 24_000
FRAME = 960  # bytes of 20 ms
SETTINGS = ReplySettings(model="m")


@dataclass(frozen=True)
class Packet:
    sequence_number: int
    timestamp: int
    payload: bytes
    ssrc: int = 1


def tone(frames: int) -> bytes:
    """Return a tone whose loudness changes, as a voice's does."""
    values = (9000 * math.sin(i / 9) * (0.6 + 0.4 * math.sin(i / 900)) for i in range(480 * frames))
    return b"".join(struct.pack("<h", round(value)) for value in values)


def packets(pcm: bytes, first: int = 65_530) -> list[Packet]:
    """Return the packets of a stream, whose sequence numbers wrap around."""
    encoder = Encoder(RATE)
    return [
        Packet((first + index) % 65_536, 960 * index, encoder.encode(pcm[at : at + FRAME]))
        for index, at in enumerate(range(0, len(pcm), FRAME))
    ]


def played(sent: list[Packet]) -> tuple[bytes, int]:
    buffer = JitterBuffer(RATE)
    return b"".join(map(buffer.push, sent)) + buffer.pause(0), buffer.lost


def error_of(pcm: bytes, other: bytes) -> float:
    """Return the RMS of the difference by that of `other`."""
    one, two = (np.frombuffer(sound, "<i2").astype(float) for sound in (pcm, other))
    return float(np.sqrt(np.mean((one - two) ** 2) / np.mean(two**2)))


def test_packets_in_any_order_are_decoded_as_in_order() -> None:
    sent = packets(tone(60))
    whole, lost = played(sent)
    assert (len(whole), lost) == (60 * FRAME, 0)
    shuffled = [packet for at in range(0, 60, 3) for packet in reversed(sent[at : at + 3])]
    assert played(sent[:1] + shuffled[:]) == (whole, 0)  # the first packet begins the stream


def test_a_lost_packet_is_recovered_from_the_next() -> None:
    sent = packets(tone(60))
    whole, _ = played(sent)
    kept = [packet for index, packet in enumerate(sent) if index % 10 != 5]
    recovered, lost = played(kept)
    assert (len(recovered), lost) == (len(whole), 6)
    silent = bytearray(whole)
    for at in range(5, 60, 10):
        silent[at * FRAME : (at + 1) * FRAME] = bytes(FRAME)
    assert error_of(recovered, whole) < 0.6 * error_of(bytes(silent), whole)


def test_any_loss_leaves_the_length_as_it_was() -> None:
    random = Random(3)
    sent = packets(tone(200))
    kept = [packet for packet in sent[:-1] if random.random() > 0.2] + sent[-1:]
    kept = kept if kept[0] is sent[0] else [sent[0], *kept]
    recovered, lost = played(kept)
    assert (len(recovered), lost) == (200 * FRAME, 200 - len(kept))


def test_few_packets_are_waited_for() -> None:
    sent = packets(tone(20))
    buffer = JitterBuffer(RATE)
    assert len(buffer.push(sent[0])) == FRAME
    for packet in sent[2 : 1 + OVERTAKING]:
        assert buffer.push(packet) == b""
    assert len(buffer.push(sent[1 + OVERTAKING])) == (OVERTAKING + 1) * FRAME
    assert buffer.push(sent[1]) == b""  # too late
    assert buffer.push(sent[3]) == b""  # a second copy


def test_garbage_and_another_stream_do_no_harm() -> None:
    sent = packets(tone(10))
    buffer = JitterBuffer(RATE)
    for packet in sent[:5]:
        buffer.push(replace(packet, payload=b"\xff" * 9))
    other = [replace(packet, ssrc=2, sequence_number=7 + i) for i, packet in enumerate(sent)]
    assert b"".join(map(buffer.push, other)) == played(sent)[0]


def test_a_pause_of_the_stream_is_silence() -> None:
    sent = packets(tone(4))
    later = [replace(packet, timestamp=packet.timestamp + 4800) for packet in sent[2:]]
    assert len(played(sent[:2] + later)[0]) == 4 * FRAME + 100 * 48
    far = [replace(packet, timestamp=packet.timestamp + 10**8) for packet in sent[2:]]
    assert len(played(sent[:2] + far)[0]) == 4 * FRAME + 500 * 48  # at most


def test_a_decoder_refuses_what_is_not_opus() -> None:
    for data in (b"", b"\xff" * 9):
        with pytest.raises(ValueError, match="pus"):
            Decoder(RATE).decode(data)
    with pytest.raises(ValueError, match="frame"):
        Encoder(RATE).encode(b"\0" * 10)


async def test_a_client_cannot_send_faster_than_time_passes() -> None:
    now = 0.0
    microphone = Microphone(lambda: RATE, lambda: now)
    sent = packets(tone(300))
    for packet in sent[:200]:
        microphone.add(packet)
    assert microphone.dropped == 50  # beyond three seconds
    pieces = microphone.pieces()
    assert len(await anext(pieces)) == 150 * FRAME
    await pieces.aclose()
    now = 1.0
    for packet in sent[200:]:
        microphone.add(packet)
    assert microphone.dropped == 50 + 100 - 62


async def test_the_rate_follows_the_session() -> None:
    rate = RATE
    microphone = Microphone(lambda: rate)
    pieces = microphone.pieces()
    for packet in packets(tone(3)):
        microphone.add(packet)
    assert len(await anext(pieces)) == 3 * FRAME
    rate = 8000
    for packet in packets(tone(3)):
        microphone.add(packet)
    assert len(await anext(pieces)) == FRAME
    await pieces.aclose()


def speak(playback: Playback, reply: str, frames: int, *, known: bool = True) -> None:
    playback.take(ReplyStarted(reply, SETTINGS, known, None))
    playback.take(OutputOpened(reply, 0, "speech", {"id": f"item_{reply}"}, None))
    rest = playback.take(SpeechDelta(reply, 0, b"\1" * FRAME * frames, "words"))
    assert rest == SpeechDelta(reply, 0, b"", "words")


def end(playback: Playback, reply: str) -> None:
    playback.take(ReplyEnded(reply_id=reply, status="completed"))


def changes(playback: Playback) -> list[tuple[str, str]]:
    return [playback.changes.get_nowait() for _ in range(playback.changes.qsize())]


async def test_replies_are_played_one_after_another() -> None:
    playback = Playback()
    assert playback.frame(FRAME) == bytes(FRAME)
    speak(playback, "a", 2)
    assert playback.frame(FRAME) == b"\1" * FRAME
    playback.frame(FRAME)
    assert playback.frame(FRAME) == bytes(FRAME)  # more of it may come
    assert changes(playback) == [("started", "a")]
    end(playback, "a")
    speak(playback, "b", 1)
    playback.frame(FRAME)
    assert changes(playback) == [("stopped", "a"), ("started", "b")]
    end(playback, "b")
    playback.frame(FRAME)
    assert changes(playback) == [("stopped", "b")]
    await playback.finish()


def test_a_reply_is_played_to_its_end_before_one_that_began_meanwhile() -> None:
    playback = Playback()
    speak(playback, "a", 1)
    playback.frame(FRAME)
    speak(playback, "b", 1, known=False)
    assert playback.frame(FRAME) == bytes(FRAME)  # more of the first may come
    playback.take(SpeechDelta("a", 0, b"\2" * FRAME, ""))
    assert playback.frame(FRAME) == b"\2" * FRAME
    playback.take(OutputClosed("a", 0, {"id": "item_a"}, None))
    assert playback.frame(FRAME) == b"\1" * FRAME
    assert changes(playback) == [("started", "a"), ("stopped", "a"), ("started", "b")]


def test_what_was_played_to_its_end_is_not_cut() -> None:
    playback = Playback()
    speak(playback, "a", 1)
    playback.frame(FRAME)
    playback.take(OutputClosed("a", 0, {"id": "item_a"}, None))
    assert playback.clear() == []


def test_what_is_cut_was_played_so_far() -> None:
    playback = Playback()
    speak(playback, "a", 5)
    playback.frame(FRAME)
    playback.frame(FRAME)
    end(playback, "a")
    speak(playback, "b", 5)
    assert playback.clear() == [("item_a", 40), ("item_b", 0)]
    assert changes(playback) == [("started", "a"), ("cleared", "a")]
    playback.take(SpeechDelta("b", 0, b"\1" * FRAME, ""))  # the rest of what was cut
    assert playback.frame(FRAME) == bytes(FRAME)
    assert playback.clear() == []


def test_what_is_outside_of_the_conversation_has_no_item_to_cut() -> None:
    playback = Playback()
    speak(playback, "a", 5, known=False)
    playback.frame(FRAME)
    assert playback.clear() == []
    assert changes(playback) == [("started", "a"), ("cleared", "a")]
