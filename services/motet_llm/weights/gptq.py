"""Read GPTQ checkpoints of AutoGPTQ and GPTQModel, and AWQ checkpoints of AutoAWQ.

(GPTQ: arXiv 2210.17323; AWQ: arXiv 2306.00978.)

| tensor | GPTQ | AWQ |
|---|---|---|
| `qweight`, int32 | `[K · bits / 32, N]`, along the inputs | `[K, N / 8]`, along N in AWQ's order; gemv `[N, K / 8]` |
| `qzeros`, int32 | `[G, N · bits / 32]`, less one in version 1 | `[G, N / 8]` as `qweight`; gemv `[N, ≥ G / 8]` |
| `scales`, float16 | `[G, N]` | `[G, N]`; gemv `[N, 8 · width of qzeros]` |
| `g_idx`, int32 | `[K]`: the group of each input, in any order with desc_act | |

Shapes: N output features, K input features, G groups of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from motet_kernels.linear.group_weights import GroupWeights
from motet_shared.errors import ConfigError

from .coded_linear import of_steps
from .packed_integers import AWQ_ORDER, unpack_columns, unpack_rows
from .tensor_files import TensorFiles

_INT32 = (torch.int32,)
_SCALES = (torch.float16, torch.bfloat16, torch.float32)


class Gptq:
    """Read the matrices of one checkpoint by the names of their modules.

    Raises ConfigError for settings that are not supported.
    """

    def __init__(self, settings: dict[str, Any], files: TensorFiles):
        self._files = files
        self._bits: Any = settings.get("bits")
        self._group: Any = settings.get("group_size", -1)
        version = settings.get("checkpoint_format", "gptq")
        if self._bits not in (4, 8):
            raise ConfigError(
                f"quantization_config.bits={self._bits!r}: 4 and 8 are read; give such a checkpoint"
            )
        if version not in ("gptq", "gptq_v2"):
            raise ConfigError(
                f"quantization_config.checkpoint_format={version!r}: gptq and gptq_v2 are read; convert it to one"
            )
        _check_group(self._group)
        self._one_less = version == "gptq"

    def has(self, module: str) -> bool:
        return f"{module}.qweight" in self._files

    def read(self, module: str, features: int, inputs: int) -> GroupWeights:
        """Return the weights of a module.

        Raises ConfigError that names a tensor which is missing or misshapen.
        """
        bits, files = self._bits, self._files
        group = inputs if self._group == -1 else self._group
        groups, per_word = -(-inputs // group), 32 // bits
        packed = files.need(f"{module}.qweight", (inputs // per_word, features), _INT32)
        scale_GN = files.need(f"{module}.scales", (groups, features), _SCALES)
        zeros = files.need(f"{module}.qzeros", (groups, features // per_word), _INT32)
        zero_GN = unpack_columns(zeros, bits)
        if self._one_less:
            zero_GN = (zero_GN.to(torch.int16) + 1) & ((1 << bits) - 1)
        steps_NK, order_K = unpack_rows(packed, bits).T, None
        if f"{module}.g_idx" in files:
            group_K = files.need(f"{module}.g_idx", (inputs,), (torch.int32, torch.int64))
            order_K = group_order(f"{module}.g_idx", group_K, group)
        if order_K is not None:
            steps_NK = steps_NK[:, order_K]
        return of_steps(module, steps_NK, scale_GN.T, zero_GN.T, bits, group, order_K)


class Awq:
    """Read AWQ's matrices: four bits, in the layouts that AutoAWQ calls gemm and gemv."""

    def __init__(self, settings: dict[str, Any], files: TensorFiles):
        self._files = files
        bits = settings.get("bits", settings.get("w_bit"))
        version = settings.get("version", "gemm")
        self._group = settings.get("group_size", settings.get("q_group_size", 128))
        if bits != 4:
            raise ConfigError(
                f"quantization_config.bits={bits!r}: 4 is read; give such a checkpoint"
            )
        if str(version).lower() not in ("gemm", "gemv"):
            raise ConfigError(
                f"quantization_config.version={version!r}: gemm and gemv are read; give such a checkpoint"
            )
        self._by_output = str(version).lower() == "gemv"
        if not settings.get("zero_point", True):
            raise ConfigError(
                "quantization_config.zero_point=false: AWQ's layouts have zero points; set it to true"
            )
        _check_group(self._group)

    def has(self, module: str) -> bool:
        return f"{module}.qweight" in self._files

    def read(self, module: str, features: int, inputs: int) -> GroupWeights:
        """Return the weights of a module; see `Gptq.read`."""
        group = inputs if self._group == -1 else self._group
        groups = -(-inputs // group)
        if self._by_output:
            return self._read_by_output(module, features, inputs, group)
        packed = self._files.need(f"{module}.qweight", (inputs, features // 8), _INT32)
        zeros = self._files.need(f"{module}.qzeros", (groups, features // 8), _INT32)
        scale_GN = self._files.need(f"{module}.scales", (groups, features), _SCALES)
        steps_KN, zero_GN = (unpack_columns(part, 4, AWQ_ORDER) for part in (packed, zeros))
        return of_steps(module, steps_KN.T, scale_GN.T, zero_GN.T, 4, group)

    def _read_by_output(self, module: str, features: int, inputs: int, group: int) -> GroupWeights:
        """Return the weights of layout gemv, whose rows of scales and zero points are padded."""
        groups = -(-inputs // group)
        packed = self._files.need(f"{module}.qweight", (features, inputs // 8), _INT32)
        words = max(-(-groups // 8), (self._files.shape(f"{module}.qzeros") or (0, 0))[-1])
        zeros = self._files.need(f"{module}.qzeros", (features, words), _INT32)
        scale_NG = self._files.need(f"{module}.scales", (features, words * 8), _SCALES)
        steps_NK, zero_NG = unpack_columns(packed, 4), unpack_columns(zeros, 4)[:, :groups]
        return of_steps(module, steps_NK, scale_NG[:, :groups].contiguous(), zero_NG, 4, group)


def _check_group(group: Any) -> None:
    if group != -1 and not (isinstance(group, int) and group >= 16 and group % 16 == 0):
        raise ConfigError(f"quantization_config.group_size={group!r}: give -1 or a multiple of 16")


def group_order(name: str, group_K: Tensor, group: int) -> Tensor | None:
    """Return the inputs' indices sorted by group; None if they are sorted.

    Raises ConfigError unless each group has `group` inputs.
    """
    due = torch.arange(len(group_K)) // group
    order_K = group_K.long().sort(stable=True)
    if not torch.equal(order_K.values, due):
        raise ConfigError(
            f"{name}: its groups are not of group_size={group} inputs each; repair config.json"
        )
    return None if torch.equal(group_K.long(), due) else order_K.indices
