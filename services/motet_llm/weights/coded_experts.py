"""Hold the experts of a quantized checkpoint as codes until they are packed.

Checkpoints store them expert by expert, as `experts.0.gate_proj` (or Mixtral's `w1`) and so on, or
all of a layer in one tensor, which mxfp4 and GGUF read whole and `TensorFiles` splits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel

from motet_kernels import gpu
from motet_kernels.linear.expert_linear import ExpertLinear
from motet_kernels.linear.group_weights import GroupWeights, can_join, joined
from motet_kernels.runtime.errors import KernelError
from motet_llm.models.experts import (
    GroupedExperts,
    PackedExperts,
    gate_of,
    is_experts,
    mix,
    parameters_of,
)
from motet_shared.errors import ConfigError

from .coded_linear import CodedLinear, CodeSource
from .packer import Packer

# Modules of the first product and of the second, by expert: gate before up.
_GATED = (
    (("#.gate_proj", "#.up_proj"), "#.down_proj"),
    (("#.w1", "#.w3"), "#.w2"),
    (("gate_up_proj.#",), "down_proj.#"),
)
_UNGATED = ((("#.up_proj",), "#.down_proj"), (("up_proj.#",), "down_proj.#"))


class Codes(Protocol):
    """Read the quantized matrices of a checkpoint, by the names of their modules."""

    def has(self, module: str) -> bool: ...

    def read(self, module: str, features: int, inputs: int) -> GroupWeights: ...


class CodedExperts(nn.Module):
    """Compute experts with quantized matrices, replacing a module of which `is_experts` holds."""

    def __init__(self, original: Any, gate_up: list[CodeSource], down: list[CodeSource]):
        super().__init__()
        self._parameters_of = parameters_of(original)
        for name in self._parameters_of:
            self.register_parameter(f"{name}_bias", getattr(original, f"{name}_bias", None))
        self.gate_up, self.down, self.gate = gate_up, down, gate_of(original)

    def forward(self, hidden: Tensor, index_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """Compute with dequantized matrices, only to examine model code; see `packed`."""
        rows_TH = hidden.reshape(-1, hidden.shape[-1])
        products = self._linears()
        return mix(rows_TH, index_Tk, weights_Tk, self.gate, *products).view(hidden.shape)

    def _linears(self) -> tuple[list[CodedLinear], list[CodedLinear]]:
        first, last = self._parameters_of
        return (
            _with_biases(first, self.gate_up, getattr(self, f"{first}_bias")),
            _with_biases(last, self.down, getattr(self, f"{last}_bias")),
        )

    def packed(self, name: str, packer: Packer) -> PackedExperts | GroupedExperts:
        """Return experts that compute the same. name: of the module.

        Raises ConfigError on a GPU if the experts' matrices are of different formats.
        """
        if gpu.is_gpu(packer.device):
            return self._grouped(name, packer)
        gate_up, down = (
            [
                linear.taken(f"{name}.{part}.{number}", packer)
                for number, linear in enumerate(linears)
            ]
            for part, linears in zip(self._parameters_of, self._linears(), strict=True)
        )
        return PackedExperts(self.gate, gate_up, down)

    def _grouped(self, name: str, packer: Packer) -> GroupedExperts:
        made = []
        for part, sources in zip(self._parameters_of, (self.gate_up, self.down), strict=True):
            bias_EN = getattr(self, f"{part}_bias")
            try:
                made.append(ExpertLinear([source() for source in sources], bias_EN, packer.device))
            except KernelError as error:
                raise ConfigError(
                    f"{name}.{part}: {error}; give the original weights", param="device"
                ) from error
        return GroupedExperts(self.gate, *made)


def _with_biases(
    name: str, sources: Sequence[CodeSource], bias_EN: Tensor | None
) -> list[CodedLinear]:
    biases = [None] * len(sources) if bias_EN is None else list(bias_EN)
    return [CodedLinear(name, *both) for both in zip(sources, biases, strict=True)]


def put_experts(model: PreTrainedModel, codes: Codes, *, lazy: bool = False) -> None:
    """Replace experts that are quantized. lazy: their codes are read when they are needed."""
    for name, module in [both for both in model.named_modules() if is_experts(both[1])]:
        experts: Any = module
        if codes.has(f"{name}.{parameters_of(experts)[0]}"):
            both = [
                _whole(codes, f"{name}.{part}", _shape(experts, part))
                for part in parameters_of(experts)
            ]
        elif (parts := _parts(codes, name, experts)) is not None:
            both = _one_by_one(codes, parts, experts)
        else:
            continue
        if not lazy:
            for source in chain(*both):
                source()
        model.set_submodule(name, CodedExperts(experts, *both))


def _whole(codes: Any, name: str, shape: tuple[int, int, int]) -> list[CodeSource]:
    """Return the sources of a parameter of all experts, which is read at once."""
    read: Callable[[], list[GroupWeights]] = cache(partial(codes.read_stack, name, *shape))
    return [
        CodeSource(shape[1:], lambda number=number: read()[number])  # type: ignore[misc]
        for number in range(shape[0])
    ]


def _shape(experts: Any, part: str) -> tuple[int, int, int]:
    """Return how many experts there are, and a matrix's output and input features."""
    count, features, inputs = getattr(experts, part).shape
    return (count, inputs, features) if experts.is_transposed else (count, features, inputs)


def _parts(codes: Codes, name: str, experts: Any) -> tuple[tuple[str, ...], str] | None:
    """Return the modules of the first product and of the second, with `#` for an expert's number.

    None if there are none. Of experts with a gate, gate comes before up.
    """
    layouts = _GATED if experts.has_gate else _UNGATED
    for first, second in layouts:
        modules = tuple(f"{name}.{part}" for part in first)
        if codes.has(modules[0].replace("#", "0")):
            return modules, f"{name}.{second}"
    return None


def _one_by_one(
    codes: Codes, parts: tuple[tuple[str, ...], str], experts: Any
) -> list[list[CodeSource]]:
    first, second = parts
    _refuse_interleaved(first, experts)
    count, features, inputs = _shape(experts, parameters_of(experts)[0])
    gate_up = [
        CodeSource(
            (features, inputs),
            partial(_side_by_side, codes, _of_expert(first, number), features, inputs),
        )
        for number in range(count)
    ]
    _, features, inputs = _shape(experts, "down_proj")
    down = [
        CodeSource(
            (features, inputs),
            partial(codes.read, second.replace("#", str(number)), features, inputs),
        )
        for number in range(count)
    ]
    return [gate_up, down]


def _of_expert(modules: Sequence[str], number: int) -> list[str]:
    return [module.replace("#", str(number)) for module in modules]


def _side_by_side(codes: Codes, modules: Sequence[str], features: int, inputs: int) -> GroupWeights:
    """Return one matrix with the rows of all modules, which have as many of the features each."""
    parts = [codes.read(module, features // len(modules), inputs) for module in modules]
    if not can_join(parts):
        raise ConfigError(
            f"{' and '.join(modules)} are quantized in different ways; give the original weights"
        )
    return joined(parts) if len(parts) > 1 else parts[0]


def _refuse_interleaved(first: tuple[str, ...], experts: Any) -> None:
    """Raise ConfigError for experts whose gate and up alternate, which no such layout keeps."""
    if len(first) > 1 and not experts.is_concatenated:
        raise ConfigError(
            f"{first[0]}: {type(experts).__name__} has the rows of gate and up in turns; "
            "give its experts in mxfp4, or the original weights"
        )
