"""G.711 against its standard, the resampler against theory and torchaudio, PCM and WAV against other readers."""

import io
import itertools
import wave
from bisect import bisect_right

import numpy as np
import pytest
import torch
import torchaudio
from hypothesis import given, settings
from hypothesis import strategies as st

from motet_media.audio import (
    Resampler,
    a_law_decode,
    a_law_encode,
    duration_ms,
    mu_law_decode,
    mu_law_encode,
    pcm_bytes,
    samples,
    wav_header,
)
from motet_shared.errors import BadRequest

EVERY_SAMPLE = np.arange(-32768, 32768).astype("<i2")
EVERY_BYTE = bytes(range(256))
RATES = (8000, 16000, 24000)


def segments(first: int, steps: list[int], intervals: list[int]) -> list[int]:
    """Decision values of ITU-T G.711's tables, column 6: `intervals` steps of each size, one after the other."""
    values = [first]
    for step, count in zip(steps, intervals, strict=True):
        values += [values[-1] + step * (number + 1) for number in range(count)]
    return values


# Table 2a (mu-law): the first interval has half the width of the rest of its segment. Table 1a (A-law).
MU_DECISIONS = [0, *segments(1, [2, 4, 8, 16, 32, 64, 128, 256], [15, *[16] * 7])]
A_DECISIONS = segments(0, [2, 4, 8, 16, 32, 64, 128], [32, *[16] * 6])


def reference(decisions: list[int], unit: int, code: dict[bool, list[int]]) -> bytes:
    """The code of every sample: the number of its magnitude's interval, and its sign."""
    encoded = bytearray()
    for sample in EVERY_SAMPLE.tolist():
        number = min(127, bisect_right(decisions, abs(sample) / unit) - 1)
        encoded.append(code[sample < 0][number])
    return bytes(encoded)


def test_the_tables_of_the_reference_are_those_of_the_standard() -> None:
    assert (len(MU_DECISIONS), MU_DECISIONS[-1], MU_DECISIONS[16], MU_DECISIONS[112]) == (
        129,
        8159,
        31,
        4063,
    )
    assert (len(A_DECISIONS), A_DECISIONS[-1], A_DECISIONS[32], A_DECISIONS[112]) == (
        129,
        4096,
        64,
        2048,
    )


def test_mu_law_encodes_as_the_standard_says() -> None:
    # Column 7: the number of the interval, inverted; the sign bit of positive values is set before inversion's end.
    codes = {
        negative: [(0x7F if negative else 0xFF) - number for number in range(128)]
        for negative in (True, False)
    }
    assert mu_law_encode(EVERY_SAMPLE.tobytes()) == reference(MU_DECISIONS, 4, codes)


def test_a_law_encodes_as_the_standard_says() -> None:
    # Even bits are inverted; positive values have the sign bit.
    codes = {
        negative: [(number | 0x80 * (not negative)) ^ 0x55 for number in range(128)]
        for negative in (True, False)
    }
    assert a_law_encode(EVERY_SAMPLE.tobytes()) == reference(A_DECISIONS, 8, codes)


def test_values_decode_to_the_middle_of_their_interval() -> None:
    for decisions, unit, decode, encode in (
        (MU_DECISIONS, 4, mu_law_decode, mu_law_encode),
        (A_DECISIONS, 8, a_law_decode, a_law_encode),
    ):
        middles = {(low + high) / 2 for low, high in itertools.pairwise(decisions)}
        if decode is mu_law_decode:
            middles = middles - {0.5} | {0.0}  # the standard's first value is zero
        decoded = np.frombuffer(decode(EVERY_BYTE), "<i2") / unit
        assert set(np.abs(decoded).tolist()) == middles
        assert (decoded[128:] >= 0).all()
        assert (decoded[:128] <= 0).all()
        again = encode(decode(EVERY_BYTE))
        assert [
            (code, back) for code, back in zip(EVERY_BYTE, again, strict=True) if code != back
        ] in (
            [],
            [(0x7F, 0xFF)],  # mu-law has two zeros
        )


@given(st.binary(max_size=300))
def test_each_byte_is_decoded_by_itself(data: bytes) -> None:
    for decode in (mu_law_decode, a_law_decode):
        assert decode(data) == b"".join(decode(bytes([byte])) for byte in data)


def test_pcm_wav_and_their_lengths() -> None:
    assert (duration_ms(48000, 24000), pcm_bytes(20, 24000), pcm_bytes(0.01, 16000)) == (
        1000.0,
        960,
        0,
    )
    assert samples(b"\x01\x00\xff\xff").tolist() == [1, -1]
    with pytest.raises(BadRequest):
        samples(b"abc")
    with pytest.raises(BadRequest):
        mu_law_encode(b"a")
    pcm = EVERY_SAMPLE[::97].tobytes()
    with wave.open(io.BytesIO(wav_header(24000, len(pcm)) + pcm)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (24000, 1, 2)
        assert file.readframes(1 << 20) == pcm
    assert len(wav_header(16000)) == 44
    assert wav_header(16000)[-4:] == b"\xff" * 4


def resampled(pcm: bytes, source: int, target: int, cuts: list[int] | None = None) -> bytes:
    resampler = Resampler(source, target)
    borders = [0, *sorted(cut % (len(pcm) + 1) for cut in cuts or []), len(pcm)]
    parts = [resampler.feed(pcm[a:b]) for a, b in itertools.pairwise(borders)]
    return b"".join([*parts, resampler.flush()])


@settings(max_examples=80)
@given(
    source=st.sampled_from([*RATES, 11025, 44100, 48000]),
    target=st.sampled_from(RATES),
    length=st.integers(0, 3000),
    cuts=st.lists(st.integers(0, 10_000), max_size=12),
    seed=st.integers(0, 1000),
)
def test_a_stream_in_pieces_is_bit_for_bit_the_whole(
    source: int, target: int, length: int, cuts: list[int], seed: int
) -> None:
    pcm = np.random.default_rng(seed).integers(-32768, 32768, length).astype("<i2").tobytes()
    whole = resampled(pcm, source, target)
    assert resampled(pcm, source, target, cuts) == whole
    assert len(whole) // 2 == -(-length * target // source)


def tone(frequency: float, rate: int, seconds: float = 0.5) -> np.ndarray:
    return 12000 * np.sin(2 * np.pi * frequency * np.arange(int(seconds * rate)) / rate)


@pytest.mark.parametrize("source", [*RATES, 22050, 44100, 48000])
@pytest.mark.parametrize("target", RATES)
def test_tones_keep_their_place_and_height_and_what_cannot_be_kept_is_gone(
    source: int, target: int
) -> None:
    lower = min(source, target) / 2
    for frequency in (40.0, 0.3 * lower, 0.78 * lower):
        got = np.frombuffer(
            resampled(tone(frequency, source).astype("<i2").tobytes(), source, target), "<i2"
        )
        inner = slice(target // 50, -target // 50)  # away from the ends, where silence is next
        assert np.abs(got - tone(frequency, target)[: len(got)])[inner].max() < 12000 * 0.002 + 1.5
    if target < source:
        got = np.frombuffer(
            resampled(tone(1.02 * lower, source).astype("<i2").tobytes(), source, target), "<i2"
        )
        assert np.abs(got[target // 50 : -target // 50]).max() < 12000 * 0.001 + 1


@pytest.mark.parametrize("source", [*RATES, 22050, 44100, 48000])
@pytest.mark.parametrize("target", RATES)
def test_what_both_rates_can_hold_is_what_torchaudio_makes_of_it(source: int, target: int) -> None:
    """Noise below 0.78 of the lower Nyquist frequency, which neither filter touches."""
    count = source // 2
    spectrum = np.fft.rfft(np.random.default_rng(source).standard_normal(count))
    spectrum[np.fft.rfftfreq(count, 1 / source) > 0.78 * min(source, target) / 2] = 0
    pcm = (3000 * np.fft.irfft(spectrum, count)).astype("<i2")
    got = np.frombuffer(resampled(pcm.tobytes(), source, target), "<i2").astype(np.float64)
    due = torchaudio.functional.resample(
        torch.from_numpy(pcm.astype(np.float64)), source, target, lowpass_filter_width=64
    ).numpy()
    inner = slice(target // 50, -target // 50)
    assert len(due) == len(got)
    assert np.abs(got - due)[inner].max() < 0.002 * np.abs(pcm).max() + 1


def test_constants_stay_and_loud_input_is_clipped_not_wrapped() -> None:
    constant = np.full(4000, 12345, "<i2").tobytes()
    middle = np.frombuffer(resampled(constant, 24000, 16000), "<i2")[100:-100]
    assert set(middle.tolist()) == {12345}
    square = np.repeat(np.tile([32767, -32768], 40), 25).astype("<i2")
    got = np.frombuffer(resampled(square.tobytes(), 8000, 24000), "<i2").astype(int)
    inner = got.reshape(-1, 75)[
        :, 15:60
    ]  # 15 output samples are 5 of the input: no overshoot changes the sign there
    assert (np.sign(inner) == np.tile([1, -1], 40)[:, None]).all()
    assert (resampled(constant, 16000, 16000)) == constant


@pytest.mark.parametrize(
    ("source", "target"), [(0, 16000), (16000, 1), (44101, 16000), (16000, 44101), (10**9, 16000)]
)
def test_rates_that_nobody_uses_are_refused(source: int, target: int) -> None:
    with pytest.raises(BadRequest) as caught:
        Resampler(source, target)
    assert caught.value.param == "sample_rate"
