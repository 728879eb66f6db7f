"""Convolutions of codecs in Triton against the modules of torch in float64, in one piece and in chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from motet_kernels.audio.codec_conv import convolve, convolve_torch
from motet_kernels.audio.packed_conv import Activation, Context, PackedConv
from motet_kernels.gpu.audio import codec_conv as kernels
from motet_kernels.runtime.errors import KernelError
from support.running.refusals import refuses

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
NONE, ELU, LEAKY = Activation(), Activation("elu", 0.7), Activation("leaky_relu", 0.1)
CAUSAL = {
    "one tap": nn.Conv1d(5, 19, 1),
    "three taps": nn.Conv1d(16, 8, 3),
    "apart": nn.Conv1d(7, 40, 3, dilation=2),
    "seven taps to one channel": nn.Conv1d(33, 1, 7, bias=False),
    "two groups": nn.Conv1d(6, 4, 3, groups=2),
    "alone": nn.Conv1d(20, 20, 3, groups=20),
    "up by 4": nn.ConvTranspose1d(6, 5, 8, 4),
    "up by 3, with a rest": nn.ConvTranspose1d(6, 5, 7, 3, bias=False),
    "up in groups": nn.ConvTranspose1d(6, 4, 4, 2, groups=2),
    "up, alone": nn.ConvTranspose1d(9, 9, 4, 2, groups=9, bias=False),
}
WHOLE = {
    "three taps": nn.Conv1d(6, 9, 3, padding=1),
    "wide and apart": nn.Conv1d(4, 4, 5, dilation=3, padding=6),
    "not as long": nn.Conv1d(4, 20, 4),
    "up by 4": nn.ConvTranspose1d(6, 5, 8, 4, padding=2),
    "up by 2": nn.ConvTranspose1d(3, 17, 5, 2, padding=1),
}


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def made(module: Any, device: torch.device, dtype: torch.dtype) -> tuple[Any, PackedConv]:
    """The module in float64 with weights of this type, and packed."""
    torch.manual_seed(3)
    module.float().reset_parameters()
    module.to(device, dtype)
    packed = PackedConv.of(module)
    return module.double(), packed


def poisoned(x: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """x inside of a larger tensor, with NaN all around."""
    streams, steps, channels = x.shape
    held = torch.full((streams, steps + 3, channels + 5), torch.nan, device=device, dtype=dtype)
    held[:, 1 : steps + 1, 2 : channels + 2] = x.to(device, dtype)
    return held[:, 1 : steps + 1, 2 : channels + 2]


def active(x_BNC: Tensor, activation: Activation) -> Tensor:
    """`[B, C, N]`."""
    x_BCN = x_BNC.double().mT
    if activation.kind == "none":
        return x_BCN
    return F.elu(x_BCN, 0.7) if activation.kind == "elu" else F.leaky_relu(x_BCN, 0.1)


def causal(module: Any, packed: PackedConv, x_BNC: Tensor, activation: Activation) -> Tensor:
    """What the module makes of a whole sequence, from its past alone: `[B, N · stride, O]`."""
    steps = x_BNC.shape[1] * packed.stride
    if isinstance(module, nn.Conv1d):
        out: Tensor = module(F.pad(active(x_BNC, activation), (packed.reach, 0))).mT
        return out
    long: Tensor = F.pad(module(active(x_BNC, activation)), (0, packed.stride)).mT
    return long[:, :steps]


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("name", CAUSAL)
def test_chunks_join_to_what_the_module_makes_of_the_whole(
    device: torch.device, name: str, dtype: torch.dtype
) -> None:
    """Three streams that begin and go on at different times; a place that is not a stream's own is NaN to it."""
    module, packed = made(CAUSAL[name], device, dtype)
    activation = {"one tap": NONE, "apart": LEAKY}.get(name, ELU)
    whole = poisoned(noise(3, 9, packed.channels), device, dtype)
    kept = torch.full((6, packed.reach, packed.channels), torch.nan, device=device, dtype=dtype)
    at, places = [0, 0, 0], [-1, -1, -1]
    found: list[list[Tensor]] = [[], [], []]
    for number, (count, streams) in enumerate(
        [(1, [0, 1]), (2, [2, 0]), (4, [1, 0, 2]), (1, [2]), (2, [1, 0, 2])]
    ):
        x = torch.stack([whole[s, at[s] : at[s] + count] for s in streams])
        after = [
            2 * s + number % 2 if places[s] != 2 * s + number % 2 else 2 * s + 1 - number % 2
            for s in streams
        ]
        rows = torch.tensor([[places[s] for s in streams], after], dtype=torch.int32, device=device)
        out = convolve(x, packed, activation, context=Context(kept, rows))
        assert out.dtype == dtype
        for row, s in enumerate(streams):
            found[s].append(out[row])
            at[s], places[s] = at[s] + count, after[row]
    assert at == [9, 7, 9]
    due = causal(module, packed, whole, activation).detach()
    for s in range(3):
        joined, wanted = torch.cat(found[s]).double(), due[s, : at[s] * packed.stride]
        torch.testing.assert_close(joined, wanted, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("steps", [1, 5, 23])
def test_padded_with_zeros_it_is_the_module(
    device: torch.device, name: str, steps: int, dtype: torch.dtype
) -> None:
    module, packed = made(WHOLE[name], device, dtype)
    x = poisoned(noise(2, steps, packed.channels), device, dtype)
    if name == "not as long" and steps == 1:
        with refuses(KernelError, "x_BNC"):
            convolve(x, packed)
        return
    out, due = convolve(x, packed, LEAKY).double(), module(active(x, LEAKY)).mT.detach()
    torch.testing.assert_close(out, due, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCES), ids=str)
@pytest.mark.parametrize(("streams", "steps"), [(1, 3), (2, 40), (0, 4)])
def test_a_residual_is_added_before_rounding(
    device: torch.device, streams: int, steps: int, dtype: torch.dtype
) -> None:
    module, packed = made(nn.Conv1d(6, 21, 3, padding=1), device, dtype)
    x, residual = (poisoned(noise(streams, steps, width), device, dtype) for width in (6, 21))
    out = convolve(x, packed, ELU, residual_BMO=residual)
    due = convolve_torch(x.double(), _wide(packed), ELU, residual.double(), None)
    torch.testing.assert_close(out.double(), due, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    torch.testing.assert_close(
        due, module(active(x, ELU)).mT.detach() + residual.double(), rtol=1e-12, atol=1e-12
    )


def _wide(packed: PackedConv) -> PackedConv:
    bias = None if packed.bias is None else packed.bias.double()
    sizes = packed.channels, packed.stride, packed.dilation, packed.left, packed.more, packed.cut
    return PackedConv(packed.taps.double(), bias, *sizes)


@pytest.mark.parametrize("name", ["apart", "alone", "up by 4"])
def test_the_twin_remembers_the_same(device: torch.device, name: str) -> None:
    """Also where a chunk is shorter than what is remembered; a stream without a place leaves all as it was."""
    _, packed = made(CAUSAL[name], device, torch.float32)
    first = noise(6, packed.reach, packed.channels).to(device)
    for steps in (1, 3):
        x = noise(4, steps, packed.channels).to(device)
        rows = torch.tensor([[-1, 2, 4, 1], [0, 3, 5, -1]], dtype=torch.int32, device=device)
        kept, wanted = first.clone(), first.clone()
        out = convolve(x, packed, ELU, context=Context(kept, rows))
        due = convolve_torch(x, packed, ELU, None, Context(wanted, rows)).view(out.shape)
        torch.testing.assert_close(out, due, rtol=1e-5, atol=1e-5)
        assert torch.equal(kept, wanted)
        assert torch.equal(kept[[1, 2, 4]], first[[1, 2, 4]])
        joined = torch.cat([torch.zeros_like(first[:1]), x[:1]], dim=1)
        assert torch.equal(kept[0], joined[0, -packed.reach :])


def test_places_that_are_not_there_are_none(device: torch.device) -> None:
    _, packed = made(CAUSAL["three taps"], device, torch.float32)
    kept = noise(2, 2, 16).to(device)
    before, x = kept.clone(), noise(1, 4, 16).to(device)
    rows = torch.tensor([[7], [2]], dtype=torch.int32, device=device)
    out = kernels.convolve(x, packed, NONE, None, Context(kept, rows))
    torch.testing.assert_close(
        out, convolve(x, packed, context=Context(kept, rows * 0 - 1)), rtol=0, atol=0
    )
    assert torch.equal(kept, before)


def test_every_configuration_gives_the_same_to_rounding(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (nn.Conv1d(40, 36, 3), nn.ConvTranspose1d(12, 12, 4, 2, groups=12)):
        _, packed = made(module, device, torch.float32)
        x = noise(2, 5, packed.channels).to(device)
        rows = torch.tensor([[1, -1], [0, 2]], dtype=torch.int32, device=device)
        first = noise(3, packed.reach, packed.channels).to(device)
        wanted = first.clone()
        due = convolve_torch(x, packed, ELU, None, Context(wanted, rows))
        of_its_kind = (
            [kernels._DEPTHWISE]
            if packed.depthwise
            else [kernels._FEW_WIDE, kernels._MANY_WIDE, kernels._NARROW]
        )
        for kernel in of_its_kind:
            for config in kernel.configs:
                only = type(kernel)(kernel.function, config)
                monkeypatch.setattr(kernels, "_kernel", lambda *_, only=only: only)
                kept = first.clone()
                out = kernels.convolve(x, packed, ELU, None, Context(kept, rows))
                torch.testing.assert_close(out, due, rtol=1e-5, atol=1e-5)
                assert torch.equal(kept, wanted)


def test_wrong_arguments_are_named(device: torch.device) -> None:
    packed = PackedConv.of(nn.Conv1d(4, 6, 3).to(device))
    x, rows = (
        torch.zeros(2, 5, 4, device=device),
        torch.zeros(2, 2, dtype=torch.int32, device=device),
    )
    kept = torch.zeros(4, 2, 4, device=device)
    wrong: list[tuple[str, Any]] = [
        ("x_BNC", lambda: convolve(x[..., :3], packed)),
        ("x_BNC", lambda: convolve(x.double(), packed)),
        ("x_BNC", lambda: convolve(x[0], packed)),
        ("conv.taps", lambda: convolve(x.half(), packed)),
        ("conv.taps", lambda: convolve(x.to("meta"), packed)),
        ("x_BNC", lambda: convolve(x[:, :1], packed)),
        (
            "residual_BMO",
            lambda: convolve(x, packed, residual_BMO=x),
        ),
        (
            "kept_SRC",
            lambda: convolve(x, packed, context=Context(kept[:, :1], rows)),
        ),
        (
            "kept_SRC",
            lambda: convolve(x, packed, context=Context(kept.half(), rows)),
        ),
        (
            "rows_2B",
            lambda: convolve(x, packed, context=Context(kept, rows.long())),
        ),
        (
            "rows_2B",
            lambda: convolve(x, packed, context=Context(kept, rows[:, :1])),
        ),
        ("kind", lambda: Activation("snake")),
        ("conv", lambda: PackedConv.of(nn.Conv1d(4, 4, 3, 2))),
        ("conv", lambda: PackedConv.of(nn.ConvTranspose1d(4, 4, 3, 2, dilation=2))),
        ("conv", lambda: PackedConv.of(nn.Conv1d(4, 4, 3, padding="same"))),
    ]
    for param, call in wrong:
        with refuses(KernelError, param):
            call()
    up = PackedConv.of(nn.ConvTranspose1d(4, 4, 4, 2).to(device))
    with refuses(KernelError, "residual_BMO"):
        convolve(x, up, residual_BMO=x)
