"""Convert raw audio: PCM, G.711 (telephony), WAV headers, and sample rates.

PCM is mono, signed 16-bit, little-endian. Only the `Resampler` needs numpy, which it imports when
it is created.
"""

from __future__ import annotations

import functools
import itertools
import math
import struct
import sys
from array import array
from typing import TYPE_CHECKING

from motet_shared.errors import BadRequest, ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

SAMPLE_BYTES = 2
UNKNOWN_LENGTH = 0xFFFFFFFF
_MU_LAW_UNIT, _A_LAW_UNIT = 4, 8  # G.711 counts in 14 and 13 bits
_Halves = tuple[bytes, bytes]  # the low and the high byte of the PCM of each G.711 code


# ---------------------------------------------------------------------------------------------- PCM
def duration_ms(nbytes: int, rate: int) -> float:
    """Return the duration of `nbytes` bytes of PCM in milliseconds."""
    return nbytes / SAMPLE_BYTES / rate * 1000


def pcm_bytes(ms: float, rate: int) -> int:
    """Return the bytes of `ms` milliseconds of PCM, in whole samples."""
    return round(ms * rate / 1000) * SAMPLE_BYTES


def samples(pcm: bytes) -> array[int]:
    """Return the samples of PCM; raise BadRequest if the last one is incomplete."""
    if len(pcm) % SAMPLE_BYTES:
        raise BadRequest(
            f"audio: {len(pcm)} bytes are no whole number of 16-bit samples", param="audio"
        )
    found = array("h", pcm)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def wav_header(rate: int, nbytes: int | None = None) -> bytes:
    """Return the 44 bytes before `nbytes` of PCM.

    None stands for an unknown length, which players accept from a pipe.
    """
    data = UNKNOWN_LENGTH if nbytes is None else nbytes
    riff = min(data + 36, UNKNOWN_LENGTH)
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        *(b"RIFF", riff, b"WAVE", b"fmt ", 16, 1, 1),
        *(rate, rate * SAMPLE_BYTES, SAMPLE_BYTES, 8 * SAMPLE_BYTES, b"data", data),
    )


# -------------------------------------------------------------------------------------------- G.711
def mu_law_decode(data: bytes) -> bytes:
    """Decode G.711 mu-law, one byte per sample, to PCM."""
    return _decoded(data, _mu_law()[0])


def mu_law_encode(pcm: bytes) -> bytes:
    """Encode PCM as G.711 mu-law.

    A value on the border of two intervals is assigned to the one further from zero.
    """
    return bytes(map(_mu_law()[1].__getitem__, samples(pcm)))


def a_law_decode(data: bytes) -> bytes:
    """Decode G.711 A-law, one byte per sample, to PCM."""
    return _decoded(data, _a_law()[0])


def a_law_encode(pcm: bytes) -> bytes:
    """Encode PCM as G.711 A-law, with the same rule for borders."""
    return bytes(map(_a_law()[1].__getitem__, samples(pcm)))


def _decoded(data: bytes, halves: _Halves) -> bytes:
    pcm = bytearray(SAMPLE_BYTES * len(data))
    pcm[::2], pcm[1::2] = (data.translate(half) for half in halves)
    return bytes(pcm)


# A law divides the magnitude into 128 intervals, in eight segments of sixteen; the interval width
# doubles with each segment. `edges` are their lower borders and `values` what they decode to, in
# the law's own units.
@functools.cache
def _mu_law() -> tuple[_Halves, bytes]:
    cells = [divmod(number, 16) for number in range(128)]
    edges = [max(0, ((2 * step + 32) << segment) - 33) for segment, step in cells]
    values = [((2 * step + 33) << segment) - 33 for segment, step in cells]
    positive = [0xFF ^ number for number in range(128)]
    negative = [0x7F ^ number for number in range(128)]
    return _tables(edges, values, _MU_LAW_UNIT, positive, negative)


@functools.cache
def _a_law() -> tuple[_Halves, bytes]:
    cells = [divmod(number, 16) for number in range(128)]
    edges = [(2 * step + 32 * bool(segment)) << max(segment - 1, 0) for segment, step in cells]
    values = [(2 * step + 32 * bool(segment) + 1) << max(segment - 1, 0) for segment, step in cells]
    positive = [number ^ 0xD5 for number in range(128)]
    negative = [number ^ 0x55 for number in range(128)]
    return _tables(edges, values, _A_LAW_UNIT, positive, negative)


def _tables(
    edges: list[int], values: list[int], unit: int, positive: list[int], negative: list[int]
) -> tuple[_Halves, bytes]:
    """Return (halves of the PCM by code, code by sample).

    A negative sample indexes the second table from its end.
    """
    low, high = bytearray(256), bytearray(256)
    for codes, sign in ((negative, -1), (positive, 1)):
        for code, value in zip(codes, values, strict=True):
            low[code], high[code] = struct.pack("<h", sign * value * unit)
    borders = [edge * unit for edge in edges] + [32769]
    widths = [after - before for before, after in itertools.pairwise(borders)]
    rising = b"".join(bytes([code]) * width for code, width in zip(positive, widths, strict=True))
    falling = b"".join(bytes([code]) * width for code, width in zip(negative, widths, strict=True))
    return (bytes(low), bytes(high)), rising[:32768] + falling[:0:-1]


# ---------------------------------------------------------------------------------------- resampler
_ZEROS = 24  # zero crossings of the filter on each side
# fraction of the lower Nyquist frequency at which the filter is at half; above 1.0 nothing passes
_ROLL_OFF = 0.9
_KAISER = 8.0  # beta: the stop band is 80 dB down
_UNIT = 1 << 18  # taps are integers in units of 1 / _UNIT
_MAX_PHASES = 640


class Resampler:
    """Resample PCM as a stream.

    A polyphase low-pass (windowed sinc, linear phase): output sample n lies at the time of input `n
    * source / target`, and is emitted once the other half of the filter has arrived (24 samples of
    the lower rate). The output is identical bit for bit however the input is cut, odd bytes
    included: all sums are of integers below 2**53.
    """

    def __init__(self, source: int, target: int):
        try:
            import numpy as np
        except ImportError as error:
            raise ConfigError("changing the sample rate needs numpy: pip install numpy") from error
        self.source, self.target = source, target
        self._up, self._down = _ratio(source, target)
        self._taps = _filter(self._up, self._down)
        self._half = (self._taps.shape[1] - 1) // 2
        self._partial_sample = b""  # first byte of an incomplete sample
        # Input from index `_first` on; silence precedes the beginning.
        self._buffered = np.zeros(self._half)
        self._first = -self._half
        self._received = 0  # samples
        self._made = 0  # samples

    def feed(self, pcm: bytes) -> bytes:
        """Return the output that `pcm` completes."""
        import numpy as np

        received = self._partial_sample + pcm
        cut = len(received) - len(received) % SAMPLE_BYTES
        self._partial_sample = received[cut:]
        fresh = np.frombuffer(received[:cut], "<i2")
        self._received += len(fresh)
        self._buffered = np.concatenate([self._buffered, fresh])
        centres = self._received - self._half  # an output may be centred on inputs below it
        return self._make(-(-centres * self._up // self._down))

    def flush(self) -> bytes:
        """Return the remaining output, as if silence followed; the resampler is then used up."""
        import numpy as np

        self._buffered = np.concatenate([self._buffered, np.zeros(self._half)])
        return self._make(-(-self._received * self._up // self._down))

    def _make(self, until: int) -> bytes:
        """Return the output samples up to number `until`."""
        import numpy as np

        if until <= self._made:
            return b""
        centre, phase = np.divmod(np.arange(self._made, until) * self._down, self._up)
        windows = np.lib.stride_tricks.sliding_window_view(self._buffered, self._taps.shape[1])
        sums = np.einsum("nk,nk->n", windows[centre - self._half - self._first], self._taps[phase])
        self._made = until
        spent = until * self._down // self._up - self._half - self._first
        self._buffered, self._first = self._buffered[spent:], self._first + spent
        made: NDArray[np.int16] = np.clip(np.floor(sums / _UNIT + 0.5), -32768, 32767).astype("<i2")
        return made.tobytes()


def _ratio(source: int, target: int) -> tuple[int, int]:
    """Return (up, down) in lowest terms; raise BadRequest for unusual rates."""
    for rate in (source, target):
        if not 4000 <= rate <= 192_000:
            raise BadRequest(
                f"sample_rate: {rate} Hz is outside 4000 to 192000", param="sample_rate"
            )
    common = math.gcd(source, target)
    if target // common > _MAX_PHASES or source // common > 12 * _MAX_PHASES:
        raise BadRequest(
            f"sample_rate: {source} Hz and {target} Hz have no small ratio; use a usual rate, such as 8000, 16000, "
            "22050, 24000, 44100 or 48000",
            param="sample_rate",
        )
    return target // common, source // common


@functools.lru_cache(16)
def _filter(up: int, down: int) -> NDArray[np.float64]:
    """Return the taps by phase, in units of 1 / _UNIT; equal rates pass samples unchanged."""
    import numpy as np

    if up == down:
        return np.full((1, 1), float(_UNIT))
    stretch = max(1.0, down / up)  # input samples per sample of the lower rate
    half = math.ceil(_ZEROS * stretch)
    offsets = np.arange(-half, half + 1)[None, :] - np.arange(up)[:, None] / up  # in input samples
    window = np.i0(_KAISER * np.sqrt(np.clip(1 - (offsets / (half + 1)) ** 2, 0, None)))
    taps = np.sinc(offsets / stretch * _ROLL_OFF) * window
    rounded: NDArray[np.float64] = np.rint(taps / taps.sum(axis=1, keepdims=True) * _UNIT)
    rounded[:, half] += _UNIT - rounded.sum(axis=1)  # a constant signal stays exactly the same
    return rounded
