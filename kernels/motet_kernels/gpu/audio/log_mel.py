"""Compute log-mel spectra: a program processes some frames from the samples to the bands.

The Fourier transform is a product with tables, a tile of frequencies at a time (as in Kapre's and
nnAudio's layers: Cheuk et al. 2020, arXiv:1912.12055), in float32 throughout: bands are resolved
down to a hundred-millionth of the loudest one.

Shapes: B recordings, N samples, T frames, W samples of a frame, F frequencies, M bands.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from motet_kernels.audio.mel_tables import FLOOR, MelTables
from motet_kernels.gpu.launch import Config, GpuKernel, LaunchSample


@triton.jit
def _log_mel(
    samples_ptr,
    stride_b,
    stride_n,
    cosines_ptr,
    sines_ptr,
    filters_ptr,
    out_ptr,
    N,
    T,
    W,
    F,
    M,
    hop,
    floor,
    FRAMES: tl.constexpr,
    WINDOW: tl.constexpr,
    FREQUENCIES: tl.constexpr,
    BANDS: tl.constexpr,
):
    recording = tl.program_id(1).to(tl.int64)
    frames = tl.program_id(0) * FRAMES + tl.arange(0, FRAMES)
    bands = tl.arange(0, BANDS)
    first = frames * hop - W // 2
    power_TM = tl.zeros([FRAMES, BANDS], tl.float32)
    for low in range(0, F, FREQUENCIES):
        frequencies = low + tl.arange(0, FREQUENCIES)
        real = tl.zeros([FRAMES, FREQUENCIES], tl.float32)
        imaginary = tl.zeros([FRAMES, FREQUENCIES], tl.float32)
        for begin in range(0, W, WINDOW):
            at = begin + tl.arange(0, WINDOW)
            place = tl.abs(first[:, None] + at[None, :])  # reflected at the first sample
            place = tl.minimum(place, 2 * N - 2 - place)  # and at the last one
            heard = (frames[:, None] < T) & (at[None, :] < W)
            source = samples_ptr + recording * stride_b + place.to(tl.int64) * stride_n
            x = tl.load(source, mask=heard, other=0.0)
            turns = at[:, None] * F + frequencies[None, :]
            there = (at[:, None] < W) & (frequencies[None, :] < F)
            real = tl.dot(
                x, tl.load(cosines_ptr + turns, mask=there, other=0.0), real, input_precision="ieee"
            )
            imaginary = tl.dot(
                x,
                tl.load(sines_ptr + turns, mask=there, other=0.0),
                imaginary,
                input_precision="ieee",
            )
        there = (frequencies[:, None] < F) & (bands[None, :] < M)
        filters = tl.load(
            filters_ptr + frequencies[:, None] * M + bands[None, :], mask=there, other=0.0
        )
        power_TM = tl.dot(
            real * real + imaginary * imaginary, filters, power_TM, input_precision="ieee"
        )
    logs = tl.log(tl.maximum(power_TM, floor)) * 0.4342944819032518
    place = (recording * M + bands[None, :]) * T + frames[:, None]
    tl.store(out_ptr + place, logs, mask=(frames[:, None] < T) & (bands[None, :] < M))


_LOG_MEL = GpuKernel(
    _log_mel,
    *(
        Config(warps=4, constants={"FRAMES": frames, "WINDOW": window, "FREQUENCIES": 32})
        for frames, window in ((16, 32), (32, 16), (16, 16))
    ),
)


def log_mel(samples_BN: Tensor, tables: MelTables) -> Tensor:
    """Compute `motet_kernels.audio.log_mel.log_mel` with Triton."""
    recordings, count = samples_BN.shape
    width, frequencies = tables.cosines_WF.shape
    bands, frames = tables.filters_FM.shape[1], count // tables.hop
    out_BMT = samples_BN.new_empty(recordings, bands, frames)
    given = tables.cosines_WF, tables.sines_WF, tables.filters_FM, out_BMT
    sizes = count, frames, width, frequencies, bands, tables.hop
    _LOG_MEL(
        lambda c: (triton.cdiv(frames, c["FRAMES"]), recordings),
        *(samples_BN, *samples_BN.stride(), *given, *sizes, FLOOR),
        BANDS=max(16, triton.next_power_of_2(bands)),
    )
    return out_BMT


def samples() -> Iterator[LaunchSample]:
    """Yield calls as services make them, for the compiler."""
    for bands in (80, 128):
        tables = MelTables.of(torch.hann_window(400), torch.zeros(201, bands), 160)
        yield LaunchSample(
            f"30 s, {bands} bands", partial(log_mel, torch.zeros(1, 480_000), tables)
        )
