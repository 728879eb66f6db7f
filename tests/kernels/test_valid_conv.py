"""Convolutions by Toom-Cook's algorithm against float64, on every instruction set."""

import pytest
import torch
import torch.nn.functional as F

from motet_kernels.audio.valid_conv import Steps, ValidConv, convolve_valid
from motet_kernels.runtime.errors import KernelError

# (taps, dilation, channels, outputs, steps): tails of tiles, of vectors and of panels; the plain path of two taps
CASES = [
    (3, 1, 32, 32, 100),
    (11, 5, 64, 64, 333),
    (7, 3, 5, 7, 97),
    (2, 1, 16, 70, 30),
    (7, 1, 32, 1, 500),
    (11, 1, 256, 40, 61),
    (4, 2, 8, 40, 200),
    (1, 1, 3, 5, 2),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("residual", [False, True])
def test_it_equals_a_plain_convolution(backend: str, case: tuple[int, ...], residual: bool) -> None:
    taps, dilation, channels, outputs, steps = case
    torch.manual_seed(0)
    weight = torch.randn(taps, channels, outputs, dtype=torch.float64) / (taps * channels) ** 0.5
    bias = torch.randn(outputs, dtype=torch.float64) if residual else None
    x_NC, count = torch.randn(steps, channels), steps - dilation * (taps - 1) + 1
    padded_NC = F.pad(F.leaky_relu(x_NC.double(), 0.1), (0, 0, 0, 1))
    wanted = F.conv1d(padded_NC.T[None], weight.permute(2, 1, 0), bias, dilation=dilation)[0].T
    added = torch.randn(count + 3, outputs)
    cut = min(7, steps - 1)
    got = convolve_valid(
        Steps(x_NC[:cut], x_NC[cut:], 1),
        ValidConv.of(weight, bias, dilation),
        0.1,
        Steps(added[:2], added[2:]) if residual else None,
    )
    wanted = wanted + added[:count] if residual else wanted
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=3e-5)


def test_pieces_give_what_the_whole_gives(backend: str) -> None:
    torch.manual_seed(1)
    conv = ValidConv.of(torch.randn(7, 16, 16) / 10, torch.randn(16), 3)
    x_NC = torch.randn(120, 16)
    whole = convolve_valid(Steps(5, x_NC, 4), conv)
    first = Steps(5, x_NC[:50])
    made = convolve_valid(first, conv)
    second = Steps(first.tail(len(made)), x_NC[50:], 4)
    pieces = torch.cat([made, convolve_valid(second, conv)])
    torch.testing.assert_close(pieces, whole, rtol=0, atol=1e-5)
    assert len(second.tail(len(second) - 2)) == 2  # within the zeros after them


def test_what_does_not_fit_is_refused() -> None:
    conv = ValidConv.of(torch.randn(3, 4, 4), None)
    for x, residual, message in (
        (Steps(0, torch.randn(2, 4)), None, "x: 2 steps"),
        (Steps(0, torch.randn(9, 5)), None, r"x: torch.float32 \[9, 5\]"),
        (Steps(0, torch.randn(4, 9).T), None, "stride 9"),
        (Steps(0, torch.randn(9, 4).double()), None, "float64"),
        (Steps(0, torch.randn(9, 4)), Steps(0, torch.randn(6, 4)), "residual: 6 steps"),
    ):
        with pytest.raises(KernelError, match=message):
            convolve_valid(x, conv, residual=residual)
