"""Define the cases of `gpu_kernels.py`: kernels at the sizes of large models, and their peers.

Peers are the twin compiled by torch ("compiled") if that works, and a library's own operator if
there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from . import attention, matrices, pictures, rows, sampling, sound
from .case import QUICK as QUICK
from .case import Case as Case
from .case import Sizes as Sizes

# By the module of `motet_kernels.gpu` that is measured.
CASES_BY_MODULE: dict[str, Callable[[Sizes, torch.device], Iterator[Case]]] = {
    "norm": rows.norms,
    "gates": rows.activations,
    "rotary": rows.rotations,
    "modulate": pictures.modulations,
    "group_norm": pictures.norms,
    "guidance": pictures.guided,
    "kv": attention.stores,
    "blocks": attention.moves,
    "paged_attention": attention.paged,
    "full_attention": attention.full,
    "quantization": matrices.roundings,
    "linear": matrices.products,
    "grouped_linear": matrices.grouped,
    "expert_linear": matrices.experts,
    "lora": matrices.adapters,
    "sampling": sampling.draws,
    "candidates": sampling.filtered_draws,
    "logprobs": sampling.logprobs,
    "speculation": sampling.agreements,
    "log_mel": sound.spectra,
    "codec_conv": sound.convolutions,
}
