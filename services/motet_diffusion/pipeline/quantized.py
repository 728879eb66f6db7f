"""Keep a denoiser's matrices in codes of 4 or 8 bits: int8 and fp8 made here, GGUF as its file has them.

The products are those of `motet_kernels.linear`: exact sums of the codes, with input rows rounded to
16 bits on a CPU where codes are integers. Only matrices within the blocks are in codes, as what is
outside of them is small and matters more. A GGUF file may have the names of diffusers, or of the
model's first release where diffusers converts them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from torch import Tensor, nn

from motet_kernels.linear.gguf_blocks import KINDS, read_blocks
from motet_kernels.linear.group_weights import GroupWeights, quantize_float8
from motet_kernels.linear.pack import pack_groups
from motet_kernels.linear.quantization import GROUP, quantize_channels
from motet_kernels.runtime.errors import KernelError
from motet_models.gguf_tensors import read_tensors
from motet_shared.errors import ConfigError

from .adapters import LoraLayer


class QuantizedLinear(nn.Module):
    """Replace an `nn.Linear`: `y = x · Wᵀ + b`, with W in codes."""

    def __init__(
        self, weights: GroupWeights, bias: Tensor | None, device: torch.device, dtype: torch.dtype
    ):
        super().__init__()
        self.out_features, self.in_features = weights.codes_NK.shape
        bias = None if bias is None else bias.detach().float()
        # Not a submodule, as packed matrices stay where and as they are when a model is moved.
        self._packed = (pack_groups(weights, bias, device, precise=True),)
        self.register_buffer("_like", torch.empty((), dtype=dtype, device=device))

    @property
    def weight(self) -> Tensor:
        """Return a tensor of the weight's form without its values; models read its dtype."""
        like: Tensor = self._like  # type: ignore[assignment]
        return like.expand(self.out_features, self.in_features)

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        out: Tensor = self._packed[0](x.contiguous())
        return out


def quantize(denoiser: nn.Module, form: str) -> int:
    """Replace the matrices of the blocks, in "int8" or "fp8"; return how many there are.

    int8: a scale for each output; fp8: e4m3 with a scale for each. Raises ConfigError if there are
    none, or a weight is not finite.
    """
    adapters = {
        part
        for layer in denoiser.modules()
        if isinstance(layer, LoraLayer)
        for factors in (layer.down, layer.up)
        for part in factors.modules()
    }
    found = dict.fromkeys(
        (parent, name, child)
        for chain in denoiser.modules()
        if isinstance(chain, nn.ModuleList) and chain not in adapters
        for parent in chain.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.in_features >= GROUP and child not in adapters
    )
    for parent, name, child in found:
        try:
            weights = _codes(child.weight, form)
        except KernelError as error:
            raise ConfigError(f"quantization={form!r}: {name}: {error}") from None
        setattr(
            parent,
            name,
            QuantizedLinear(weights, child.bias, child.weight.device, child.weight.dtype),
        )
    if not found:
        kind = type(denoiser).__name__
        raise ConfigError(
            f"quantization={form!r}: a {kind} has no matrices in blocks; leave it out"
        )
    return len(found)


def _codes(weight: Tensor, form: str) -> GroupWeights:
    whole = weight.detach().float().cpu()
    if form == "fp8":
        return quantize_float8(whole)
    codes, scales = quantize_channels(whole)
    group = -(-whole.shape[1] // GROUP) * GROUP
    return GroupWeights(codes, scales.unsqueeze(1), None, group)


def load_gguf(kind: Any, file: Path, config: Path, dtype: torch.dtype) -> Any:
    """Return the denoiser of class `kind` with the weights of a GGUF file, not yet in our codes.

    config: the folder of its config.json. Raises ConfigError for a file that is no GGUF or does not
    fit.
    """
    where = f"denoiser={str(file)!r}"
    if not file.is_file() or file.suffix != ".gguf":
        raise ConfigError(f"{where}: is no GGUF file; give one")
    read_tensors(file)  # bounds what the header says before anything is read by it
    if not hasattr(kind, "from_single_file"):
        raise ConfigError(f"{where}: diffusers reads no such file for a {kind.__name__}")
    from diffusers import GGUFQuantizationConfig

    try:
        return kind.from_single_file(
            str(file),
            config=str(config),
            quantization_config=GGUFQuantizationConfig(compute_dtype=dtype),
            dtype=dtype,
            local_files_only=True,
        )
    except Exception as error:  # whatever diffusers raises for a file is the cause of its refusal
        first = (str(error).strip() or type(error).__name__).split("\n")[0]
        raise ConfigError(f"{where}: diffusers does not load it for this model: {first}") from None


def pack_gguf(denoiser: nn.Module, dtype: torch.dtype) -> int:
    """Replace diffusers' layers of GGUF codes by ours; return how many stay in codes.

    Codes that our kernels lack, and those of other layers than matrices, are dequantized.
    """
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter, dequantize_gguf_tensor

    count = 0
    for parent in list(denoiser.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, GGUFLinear):
                continue
            weight, bias = child.weight, child.bias
            bias = None if bias is None else _plain(bias, dtype)
            form = _kind(weight)
            if form in KINDS:
                setattr(parent, name, _coded(weight.as_tensor(), form, bias, dtype))
                count += 1
                continue
            plain = nn.Linear(child.in_features, child.out_features, bias=bias is not None)
            plain.weight = nn.Parameter(_plain(weight, dtype), requires_grad=False)
            if bias is not None:
                plain.bias = nn.Parameter(bias, requires_grad=False)
            setattr(parent, name, plain)
    for module in denoiser.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, GGUFParameter):
                value = dequantize_gguf_tensor(parameter).to(dtype)
                setattr(module, name, nn.Parameter(value, requires_grad=False))
            elif parameter.dtype != dtype:
                parameter.data = parameter.data.to(dtype)
    return count


def _coded(rows: Tensor, form: str, bias: Tensor | None, dtype: torch.dtype) -> QuantizedLinear:
    read = read_blocks(form, rows.cpu())
    try:
        weights = GroupWeights(*read[:4], levels=read.levels, narrow=read.narrow)
    except KernelError as error:
        raise ConfigError(f"denoiser: {error}; give another file") from None
    return QuantizedLinear(weights, bias, rows.device, dtype)


def _kind(weight: Any) -> str:
    quant = getattr(weight, "quant_type", None)
    return "F32" if quant is None else gguf.GGMLQuantizationType(quant).name


def _plain(weight: Any, dtype: torch.dtype) -> Tensor:
    from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

    value = weight if _kind(weight) == "F32" else dequantize_gguf_tensor(weight)
    return value.detach().to(dtype)  # type: ignore[no-any-return]
