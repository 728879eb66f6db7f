"""Compute multi-head latent attention (MLA), caching the latent, not the heads that it expands to.

Per token MLA keeps a latent vector of R numbers and one rotated key of r dimensions that all heads
share. A head's key is `[K_h · latent | rope]` and its value `V_h · latent`. So a score is `q_nope ·
K_h · latent + q_rope · rope`: with `q_nope · K_h` as the query, all heads attend to the same
`[latent | rope]`, whose first R numbers are also the value, and `V_h` is applied to the result.
DeepSeek-V2 (arXiv 2405.04434), section 2.1.2 and appendix C, calls this absorbing the projections.

transformers' modules compress first and expand in a method of their own, `expand_kv`, right before
they call the attention function. `install` replaces those two points and leaves the rest of the
module to transformers: the projections and their norms, the rotation, scaling and gating of the
model family, and the scale with YaRN's correction.

Shapes: N packed tokens, H heads, R latent rank, C = R + rotary dimensions, D key dimensions without
rotation, Q = D + rotary dimensions, V value dimensions.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from motet_kernels.linear.head_linear import GPU_FORMATS as FORMATS
from motet_kernels.linear.head_linear import HeadLinear
from motet_llm.cache.kv_cache import CPU
from motet_shared.errors import ConfigError

NAME = "motet_latent"


class LatentLayout(Protocol):
    """Define the interface of the step's layout that a latent layer needs."""

    def attend_latent(
        self, layer: int, query_NHC: Tensor, latent_NC: Tensor, value_dim: int, scale: float
    ) -> Tensor:
        """Store `latent_NC`, then attend causally to all latents. Return `[N, H, value_dim]`.

        Latents are the keys of all heads, and their first `value_dim` numbers the values.
        """
        ...


class LatentHeads(nn.Module):
    """Replace `kv_b_proj` by its two halves, by head: views of its weight until `pack`."""

    key_HRD: Tensor
    value_HVR: Tensor

    def __init__(self, attention: nn.Module):
        super().__init__()
        source: Any = attention
        weight: Tensor = source.kv_b_proj.weight.detach()
        key_dim: int = source.qk_nope_head_dim
        both_HXR = weight.unflatten(0, (-1, key_dim + source.v_head_dim))
        self.rank, self.key_dim = weight.shape[1], key_dim
        self.register_buffer("key_HRD", both_HXR[:, :key_dim].transpose(1, 2), persistent=False)
        self.register_buffer("value_HVR", both_HXR[:, key_dim:], persistent=False)
        self.to_latent: HeadLinear | None = None
        self.from_latent: HeadLinear | None = None

    def pack(self, form: str, device: torch.device = CPU) -> None:
        """Pack both products for `motet_kernels`, and release the checkpoint's weight.

        They have 32 or 16 bits: coarser formats are not used, because both halves act on the cached
        latent of every head.
        """
        if self.to_latent is None:
            form = form if form in FORMATS else self._half_precision()
            self.to_latent = HeadLinear.pack(self.key_HRD, form, device)
            self.from_latent = HeadLinear.pack(self.value_HVR, form, device)
            del self.key_HRD, self.value_HVR

    def _half_precision(self) -> str:
        return "float16" if self.key_HRD.dtype == torch.float16 else "bfloat16"

    def join_latent(self, latent_11NR: Tensor, rope_11Nr: Tensor) -> tuple[Tensor, Tensor]:
        """Replace `expand_kv`: keys `[1, 1, N, C]` and values `[1, 1, N, R]`, one head for all."""
        return torch.cat((latent_11NR, rope_11Nr), dim=-1), latent_11NR

    def attend(
        self, layout: LatentLayout, layer: int, query_NHQ: Tensor, latent_NC: Tensor, scale: float
    ) -> Tensor:
        """Attend with queries `[N, H, Q]` as the module computes them. Return `[N, H, V]`."""
        query_NHC = query_NHQ.new_empty(*query_NHQ.shape[:2], latent_NC.shape[1])
        nope_NHD, absorbed_NHR = query_NHQ[..., : self.key_dim], query_NHC[..., : self.rank]
        if self.to_latent is None:
            absorbed_NHR.copy_(by_head(nope_NHD, self.key_HRD))
        else:
            self.to_latent(nope_NHD, absorbed_NHR)
        query_NHC[..., self.rank :] = query_NHQ[..., self.key_dim :]
        out_NHR = layout.attend_latent(layer, query_NHC, latent_NC, self.rank, scale)
        if self.from_latent is None:
            return by_head(out_NHR, self.value_HVR)
        out: Tensor = self.from_latent(out_NHR)
        return out


def by_head(x_NHi: Tensor, weight_Hoi: Tensor) -> Tensor:
    """Multiply each head by its matrix. Return `[N, H, o]`."""
    return (x_NHi.transpose(0, 1) @ weight_Hoi.mT.to(x_NHi.dtype)).transpose(0, 1)


def latent_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: LatentLayout | None = None,
    scaling: float,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend for installed modules: queries `[1, H, N, D + rotary]`, output `[1, N, H, V]`.

    Raises ConfigError for a mask, a window, sinks or soft-capping: no known MLA family has them.
    """
    if layout is None or attention_mask is not None:
        raise ConfigError(
            f"{type(module).__name__} keeps its own masks or drops keyword arguments: not supported"
        )
    heads = module.kv_b_proj
    extra = [
        name
        for name in ("sliding_window", "softcap", "s_aux", "indices")
        if options.get(name) is not None
    ]
    if (
        extra
        or not isinstance(heads, LatentHeads)
        or key.shape[1] != 1
        or value.shape[-1] != heads.rank
    ):
        what = f"passes {', '.join(extra)}" if extra else "changes the latent after expand_kv"
        raise ConfigError(f"{type(module).__name__} {what}: latent attention does not support it")
    layer: int = module.layer_idx  # type: ignore[assignment]
    return heads.attend(layout, layer, query[0].transpose(0, 1), key[0, 0], scaling).unsqueeze(
        0
    ), None


def install(model: PreTrainedModel) -> int:
    """Make a loaded model's MLA modules cache their latents; return how many were changed.

    Raises ConfigError for a module that has `kv_b_proj` but is not the MLA described above: one
    that selects tokens by an index of its own (DeepSeek-V3.2), and one whose `expand_kv` computes
    something else.
    """
    modules = [module for module in model.modules() if hasattr(module, "kv_b_proj")]
    configs: dict[int, Any] = {}
    for module in modules:
        _check(module)
        heads = LatentHeads(module)
        _compare(module, heads)
        module.expand_kv = heads.join_latent
        module.kv_b_proj = heads
        # transformers finds the attention function in the module's config, which all modules share.
        config = module.config
        if id(config) not in configs:
            configs[id(config)] = copy.copy(config)
            configs[id(config)]._attn_implementation = NAME
        module.config = configs[id(config)]
    if modules:
        AttentionInterface.register(NAME, latent_attention)
    return len(modules)


def _check(module: nn.Module) -> None:
    name = type(module).__name__
    if getattr(module, "indexer", None) is not None:
        raise ConfigError(
            f"{name} attends to the tokens that an indexer selects (sparse attention): not supported"
        )
    wanted = ("expand_kv", "qk_nope_head_dim", "v_head_dim", "layer_idx", "config")
    missing = [attribute for attribute in wanted if not hasattr(module, attribute)]
    if missing or not isinstance(module.kv_b_proj, nn.Linear) or module.kv_b_proj.bias is not None:
        what = f"no {', '.join(missing)}" if missing else "a kv_b_proj that is not a plain matrix"
        raise ConfigError(f"{name} has {what}: this form of MLA is not supported")


def _compare(module: nn.Module, heads: LatentHeads) -> None:
    """Raise ConfigError unless the module expands a token of small integers as the heads do."""
    rope_dim: int = module.qk_rope_head_dim  # type: ignore[assignment]
    value_HVR = heads.value_HVR
    latent = (
        (torch.arange(heads.rank, device=value_HVR.device) % 5 - 2)
        .to(value_HVR.dtype)
        .view(1, 1, 1, -1)
    )
    rope = (
        torch.arange(1, rope_dim + 1, device=value_HVR.device).to(value_HVR.dtype).view(1, 1, 1, -1)
    )
    with torch.inference_mode():
        keys, values = module.expand_kv(latent, rope)  # type: ignore[operator]
        expanded = torch.cat(
            (latent[0, 0] @ heads.key_HRD, rope[0].expand(len(value_HVR), 1, -1)), dim=-1
        )
        pairs = [(keys[0], expanded), (values[0], latent[0, 0] @ value_HVR.mT)]
    for actual, expected in pairs:
        tolerance = 0.05 if value_HVR.dtype.itemsize < 4 else 1e-4
        if actual.shape != expected.shape or not torch.allclose(
            actual, expected, tolerance, tolerance, equal_nan=True
        ):
            raise ConfigError(
                f"{type(module).__name__}.expand_kv is not a product with kv_b_proj: not supported"
            )
