"""Read compressed-tensors checkpoints: integers packed into int32, int8, or unpacked float8.

| tensor | |
|---|---|
| `weight_packed`, int32 `[N, K · bits / 32]` | steps plus half their range, the lowest bits first |
| `weight` | int8 or float8 `[N, K]`, where it is not packed |
| `weight_scale` | `[N, G]`; a scale per output `[N, 1]`, per block `[N / b, K / b]` or one `[1]` |
| `weight_zero_point` | as the steps: int8 `[N, G]`, or packed along N, int32 `[N · bits / 32, G]` |
| `weight_g_idx`, int32 `[K]` | the group of each input |

Activations, which some of these formats round too, are not rounded here; the weights are the
checkpoint's, to the bit.

Shapes: N output features, K input features, G groups of them.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from motet_kernels.linear.group_weights import FLOAT8, GroupWeights
from motet_shared.errors import ConfigError

from .coded_linear import checked, of_steps
from .gptq import group_order
from .packed_integers import unpack_columns, unpack_rows
from .tensor_files import TensorFiles

_INT32, _FLOATS = (torch.int32,), (torch.float16, torch.bfloat16, torch.float32)
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


class Compressed:
    """Read the matrices of one checkpoint by the names of their modules.

    Raises ConfigError for settings that are not supported.
    """

    def __init__(self, settings: dict[str, Any], files: TensorFiles):
        self._files = files
        form = settings.get("format")
        if form not in FORMATS:
            known = ", ".join(FORMATS)
            raise ConfigError(
                f"quantization_config.format={form!r}: {known} are read; convert it to one of these"
            )
        self._groups = [
            _Scheme(name, group) for name, group in (settings.get("config_groups") or {}).items()
        ]
        if not self._groups:
            raise ConfigError(
                "quantization_config.config_groups is missing; it says how the weights are quantized"
            )

    def has(self, module: str) -> bool:
        if f"{module}.weight_packed" in self._files:
            return True
        return self._files.dtype(f"{module}.weight") in (torch.int8, FLOAT8)

    def read(self, module: str, features: int, inputs: int) -> GroupWeights:
        """Return the weights of a module.

        Raises ConfigError that names a tensor which is missing or misshapen.
        """
        scheme = next(
            (one for one in self._groups if any(map(one.is_for, self._names(module)))), None
        )
        if scheme is None:
            raise ConfigError(
                f"{module} is quantized, but no entry of quantization_config.config_groups is for it"
            )
        packed = self._files.take(f"{module}.weight_packed") is not None
        self._files.take(f"{module}.weight_shape")
        if not packed and scheme.kind == "float":
            return self._float8(module, features, inputs, scheme)
        return self._integers(module, features, inputs, scheme, packed)

    def _names(self, module: str) -> set[str]:
        """Return the names of a module: the model's, and the one that the file has."""
        tensors = [f"{module}.{end}" for end in ("weight_packed", "weight")]
        return {module, *(self._files.stored_name(one).rpartition(".")[0] for one in tensors)}

    def _float8(self, module: str, features: int, inputs: int, scheme: _Scheme) -> GroupWeights:
        codes_NK = self._files.need(f"{module}.weight", (features, inputs), (FLOAT8,))
        scale_NG, group = self._scales(module, features, inputs, scheme)
        return checked(module, codes_NK, scale_NG, None, group)

    def _integers(
        self, module: str, features: int, inputs: int, scheme: _Scheme, packed: bool
    ) -> GroupWeights:
        bits, files = scheme.bits, self._files
        half = 1 << (bits - 1)
        if packed:
            words = -(-inputs * bits // 32)
            whole = files.need(f"{module}.weight_packed", (features, words), _INT32)
            steps_NK = unpack_columns(whole, bits)[:, :inputs]
        else:
            codes_NK = files.need(f"{module}.weight", (features, inputs), (torch.int8,))
            if not -half <= int(codes_NK.min()) <= int(codes_NK.max()) < half:
                raise ConfigError(
                    f"{module}.weight: an integer is beyond {bits} bits; copy the checkpoint again"
                )
            steps_NK = (codes_NK.to(torch.int16) + half).to(torch.uint8)
        scale_NG, group = self._scales(module, features, inputs, scheme)
        zero_NG = (
            None
            if scheme.symmetric
            else self._zeros(module, features, scale_NG.shape[1], bits, packed)
        )
        order_K = None
        if f"{module}.weight_g_idx" in files:
            group_K = files.need(f"{module}.weight_g_idx", (inputs,), (torch.int32, torch.int64))
            order_K = (
                None
                if bool((group_K < 0).all())
                else group_order(f"{module}.weight_g_idx", group_K, group)
            )
        if order_K is not None:
            steps_NK = steps_NK[:, order_K]
        return of_steps(module, steps_NK, scale_NG, zero_NG, bits, group, order_K)

    def _scales(
        self, module: str, features: int, inputs: int, scheme: _Scheme
    ) -> tuple[Tensor, int]:
        """Return scales, float32 `[N, G]`, and the size of a group in inputs."""
        name = f"{module}.weight_scale"
        if scheme.strategy == "tensor":
            scale = self._files.take(name)
            if scale is None or scale.numel() != 1:
                shape = None if scale is None else list(scale.shape)
                raise ConfigError(f"{name} is {shape}, not one scale; copy the checkpoint again")
            return scale.float().reshape(1, 1).expand(features, 1).contiguous(), -(
                -inputs // 32
            ) * 32
        if scheme.strategy == "channel":
            return self._files.need(name, (features, 1), _FLOATS).float(), -(-inputs // 32) * 32
        if scheme.strategy == "block":
            high, wide = scheme.block
            blocks = (-(-features // high), -(-inputs // wide))
            scale_BG = self._files.need(name, blocks, _FLOATS).float()
            return scale_BG.repeat_interleave(high, 0)[:features].contiguous(), wide
        groups = -(-inputs // scheme.group)
        return self._files.need(name, (features, groups), _FLOATS).float(), scheme.group

    def _zeros(self, module: str, features: int, groups: int, bits: int, packed: bool) -> Tensor:
        """Return the steps that represent zero, `[N, G]`."""
        name = f"{module}.weight_zero_point"
        if packed:
            words = -(-features * bits // 32)
            return unpack_rows(self._files.need(name, (words, groups), _INT32), bits)[:features]
        zero_NG = self._files.need(name, (features, groups), (torch.int8,))
        return zero_NG.to(torch.int16) + (1 << (bits - 1))


class _Scheme:
    """Represent one entry of config_groups: how the modules that it targets are quantized."""

    def __init__(self, name: str, entry: dict[str, Any]):
        where = f"quantization_config.config_groups.{name}"
        weights = entry.get("weights") or {}
        self._targets = list(entry.get("targets") or ())
        self.kind: Any = weights.get("type", "int")
        self.bits: Any = weights.get("num_bits")
        self.symmetric = bool(weights.get("symmetric", True))
        self.strategy = weights.get("strategy") or (
            "group" if weights.get("group_size") else "channel"
        )
        self.group = weights.get("group_size") or -1
        self.block: tuple[int, int] = tuple(weights.get("block_structure") or (0, 0))
        if (self.kind, self.bits) not in (("int", 4), ("int", 8), ("float", 8)):
            raise ConfigError(
                f"{where}: {self.kind} of {self.bits} bits; int of 4 or 8 and float of 8 bits are read"
            )
        if self.strategy not in ("tensor", "channel", "group", "block"):
            raise ConfigError(
                f"{where}.weights.strategy={self.strategy!r}: tensor, channel, group and block are read"
            )
        if self.strategy == "group" and (self.group < 16 or self.group % 16):
            raise ConfigError(f"{where}.weights.group_size={self.group!r}: give a multiple of 16")
        if self.strategy == "block" and (
            len(self.block) != 2 or min(self.block) < 1 or self.block[1] % 16
        ):
            raise ConfigError(
                f"{where}.weights.block_structure={self.block!r}: give rows and a multiple of 16"
            )

    def is_for(self, module: str) -> bool:
        def hits(target: str) -> bool:
            if target.startswith("re:"):
                return re.match(target[3:], module) is not None
            return target in ("Linear", module)

        return any(map(hits, self._targets))
