"""Encode and decode Opus with libopus, which PyAV's wheels include.

FFmpeg's interface has no way to recover a lost packet from its successor or to conceal it, which
is why libopus is called directly. Sizes are in samples of the given rate; sound is mono PCM.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from functools import cache
from pathlib import Path

from motet_media.audio import SAMPLE_BYTES
from motet_shared.errors import Unavailable

FRAME_MS = 20
LONGEST_MS = 120  # of a packet (RFC 6716, section 2.1.4)
_MOST_PACKET = 1275  # bytes of an encoded frame (RFC 6716, section 3.4)
_VOIP = 2048  # OPUS_APPLICATION_VOIP
_SET_BITRATE, _SET_FEC, _SET_LOSS, _SET_COMPLEXITY = 4002, 4012, 4014, 4010
_BIT_RATE = 32_000
_COMPLEXITY = 5  # of 10: a core serves hundreds of calls


class Encoder:
    """Encode frames of 20 ms, each with a copy of the last one at a lower rate (in-band FEC)."""

    def __init__(self, rate: int, loss: int = 10):
        """Encode PCM of `rate` Hz for a network that loses `loss` percent of the packets."""
        self._opus = _library()
        error = ctypes.c_int()
        self._state = self._opus.opus_encoder_create(rate, 1, _VOIP, ctypes.byref(error))
        _check(error.value)
        for request, value in (
            (_SET_BITRATE, _BIT_RATE),
            (_SET_COMPLEXITY, _COMPLEXITY),
            (_SET_FEC, 1),
            (_SET_LOSS, loss),
        ):
            _check(self._opus.opus_encoder_ctl(self._state, request, ctypes.c_int(value)))
        self._samples = rate * FRAME_MS // 1000
        self._buffer = ctypes.create_string_buffer(_MOST_PACKET)

    @property
    def frame_bytes(self) -> int:
        return self._samples * SAMPLE_BYTES

    def encode(self, pcm: bytes) -> bytes:
        """Return the packet of one frame. Raises ValueError if `pcm` has another length."""
        if len(pcm) != self.frame_bytes:
            raise ValueError(f"{len(pcm)} bytes of PCM; a frame has {self.frame_bytes}")
        size = self._opus.opus_encode(self._state, pcm, self._samples, self._buffer, _MOST_PACKET)
        _check(size)
        return self._buffer.raw[:size]

    def __del__(self) -> None:
        if state := getattr(self, "_state", None):
            self._opus.opus_encoder_destroy(state)


class Decoder:
    """Decode the packets of one stream in their order; lost ones are recovered or concealed."""

    def __init__(self, rate: int):
        self._opus = _library()
        error = ctypes.c_int()
        self._state = self._opus.opus_decoder_create(rate, 1, ctypes.byref(error))
        _check(error.value)
        self._rate = rate
        self._longest = rate * LONGEST_MS // 1000
        self._buffer = ctypes.create_string_buffer(self._longest * SAMPLE_BYTES)

    def decode(self, packet: bytes) -> bytes:
        """Return the sound of a packet. Raises ValueError if it is not Opus."""
        return self._decode(packet, self._longest, 0)

    def recover(self, following: bytes, samples: int) -> bytes:
        """Return the sound of the lost packet before `following`, from that one's copy of it.

        Without a copy, it is concealed. Raises ValueError if `following` is not Opus.
        """
        return self._decode(following, samples, 1)

    def conceal(self, samples: int) -> bytes:
        """Return a continuation of the sound for lost packets, which fades out."""
        return self._decode(None, samples, 0)

    def samples_of(self, packet: bytes) -> int:
        """Return the length of a packet in samples; 0 if it is not Opus."""
        count: int = self._opus.opus_packet_get_nb_samples(packet, len(packet), self._rate)
        return max(0, count)

    def _decode(self, packet: bytes | None, samples: int, recover: int) -> bytes:
        size = 0 if packet is None else len(packet)
        if packet == b"":
            raise ValueError("an Opus packet has at least one byte")
        count = self._opus.opus_decode(self._state, packet, size, self._buffer, samples, recover)
        if count < 0:
            raise ValueError(f"libopus: error {count}")
        return self._buffer.raw[: count * SAMPLE_BYTES]

    def __del__(self) -> None:
        if state := getattr(self, "_state", None):
            self._opus.opus_decoder_destroy(state)


def _check(code: int) -> None:
    if code < 0:
        raise ValueError(f"libopus: error {code}")


@cache
def _library() -> ctypes.CDLL:
    """Return libopus: that of PyAV's wheel, or the system's. Raises Unavailable without it."""
    import av

    folder = Path(av.__file__).parent.parent / "av.libs"
    found = sorted(f"{path}" for path in folder.glob("libopus-*.so*"))
    name = found[0] if found else ctypes.util.find_library("opus")
    if name is None:
        raise Unavailable("calls need libopus, which is not installed here: install libopus0")
    library = ctypes.CDLL(name)
    library.opus_encoder_create.restype = library.opus_decoder_create.restype = ctypes.c_void_p
    for function in (library.opus_encoder_destroy, library.opus_decoder_destroy):
        function.argtypes = [ctypes.c_void_p]
    pointer, data, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int
    library.opus_encoder_ctl.argtypes = [pointer, size]  # and one value, which is variadic
    library.opus_encode.argtypes = [pointer, data, size, data, size]
    library.opus_decode.argtypes = [pointer, data, size, data, size, size]
    library.opus_packet_get_nb_samples.argtypes = [data, size, size]
    return library
