"""Optimize a loaded model without changing what it computes: pack matrices and join siblings.

Every `nn.Linear` becomes a `motet_kernels.linear.linear.Linear` in the wanted format. Projections
of one input (queries, keys and values; gate and up) become one product, whose parts are returned by
modules of the same names: model code calls what it called before. A tied embedding reads its rows
from the packed head, so that it costs no copy. All that is not a matrix is converted to the dtype
of the activations, and everything is moved to the device that computes.
"""

from __future__ import annotations

import inspect
from dis import get_instructions
from functools import cache
from itertools import pairwise
from types import CodeType

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from motet_kernels import gpu
from motet_kernels.linear.head_linear import HeadLinear
from motet_kernels.linear.linear import Linear
from motet_llm.adapters.bank import Matrix, find_matrices
from motet_llm.attention.latent import LatentHeads
from motet_llm.cache.kv_cache import CPU
from motet_llm.weights import coded_linear as coded
from motet_llm.weights.coded_experts import CodedExperts
from motet_llm.weights.packer import Packer

from . import fused_layers, other_experts
from .joined_linear import JoinedLinear, JoinedPart

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
EXACT = ("float32", "bfloat16", "float16")


def optimize(
    model: PreTrainedModel,
    weights: str,
    dtype: torch.dtype,
    device: torch.device = CPU,
    matrices: dict[str, Matrix] | None = None,
    *,
    packer: Packer | None = None,
    packs_experts: bool = False,
) -> dict[str, int]:
    """Pack a model that is ready to run on the CPU, in place.

    Returns how many modules were packed, joined or replaced. weights: a format of
    `motet_kernels.linear.linear`; with quantized ones embeddings stay exact. dtype: of activations.
    device: where it will run. matrices: filled with the matrices that adapters may change. packer:
    packs in that format for that device. packs_experts: also where transformers' would do, so that
    rows do not depend on each other. Each original matrix is freed once it is packed.
    """
    packer = packer or Packer(weights, device)
    counts = {"packed": coded.pack(model, SIBLINGS, dtype, packer), "joined": 0}
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = isinstance(head, nn.Linear) and head.weight is getattr(
        embedding, "weight", None
    )  # none if it is quantized
    for path, parent in list(model.named_modules()):
        if isinstance(parent, LatentHeads):
            parent.pack(weights, device)
        for names in SIBLINGS:
            counts["joined"] += _join(path, parent, names, packer)
        for name, child in list(parent.named_children()):
            full = f"{path}.{name}"
            if isinstance(child, CodedExperts):
                setattr(parent, name, child.packed(full, packer))
                counts["packed"] += 1
            elif (packs_experts or _packs_experts(weights, device)) and (
                experts := other_experts.pack(full, child, packer)
            ) is not None:
                setattr(parent, name, experts)
                counts["packed"] += 1
            elif type(child) is nn.Linear and not _reads_weight(type(parent), name):  # type: ignore[arg-type]
                setattr(parent, name, _pack(full, [child], packer))
                counts["packed"] += 1
            elif (
                isinstance(child, HeadLinear)
                and gpu.is_gpu(device)
                and not isinstance(parent, LatentHeads)
            ):
                setattr(parent, name, HeadLinear.pack(child.weight(), "float32", device))
    head = model.get_output_embeddings()
    if tied and weights in EXACT and isinstance(head, Linear) and type(embedding) is nn.Embedding:
        model.set_input_embeddings(TiedEmbedding(head, dtype))
    _convert_rest(model, dtype, device)
    if (
        matrices is not None
    ):  # before layers are replaced: modules still have the checkpoint's names
        matrices |= find_matrices(model)
    if dtype != torch.float32 and not gpu.is_gpu(device):
        return counts
    stored = packer.stored
    packer.fused = fused_layers.install(model, device, None if stored is None else stored.fused)
    return counts | packer.fused.counts()


def _packs_experts(weights: str, device: torch.device) -> bool:
    """Return True if experts are packed: on a GPU, only in codes; floats are transformers' there."""
    return weights not in EXACT if gpu.is_gpu(device) else weights != "float32"


def _pack(name: str, linears: list[nn.Linear], packer: Packer) -> Linear:
    """Return one matrix with the rows of all `linears`."""
    biases = [linear.bias for linear in linears]
    bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
    return packer.linear(name, [linear.weight for linear in linears], bias)


@cache
def _reads_weight(parent: type[nn.Module], name: str) -> bool:
    """Return True if model code reads a child's weight itself."""
    classes = [
        c for c in parent.__mro__ if c.__module__.startswith(("transformers.", "motet_llm."))
    ]
    return any(_reads(code, name) for c in classes for code in _methods(c))


def _reads(code: CodeType, name: str) -> bool:
    """Return True if code, or a function within it, has the expression `.name.weight`."""
    if name in code.co_names and "weight" in code.co_names:
        read = [step.argval if "ATTR" in step.opname else None for step in get_instructions(code)]
        if (name, "weight") in pairwise(read):
            return True
    return any(_reads(inner, name) for inner in code.co_consts if isinstance(inner, CodeType))


@cache
def _methods(kind: type) -> list[CodeType]:
    """Return the code of the methods that a class itself defines."""
    methods = (getattr(member, "fget", member) for member in vars(kind).values())
    return [inspect.unwrap(method).__code__ for method in methods if inspect.isfunction(method)]


# ------------------------------------------------------------------------------------------------------------- siblings
def _join(path: str, parent: nn.Module, names: tuple[str, ...], packer: Packer) -> int:
    """Compute the children of these names as one product if they are compatible; return 1 if so.

    path: name of the parent in the model.
    """
    children = [getattr(parent, name, None) for name in names]
    linears = [child for child in children if type(child) is nn.Linear]
    if len(linears) < len(names) or any(_reads_weight(type(parent), n) for n in names):  # type: ignore[arg-type]
        return 0
    if len({(linear.in_features, linear.bias is None) for linear in linears}) > 1:
        return 0
    joined = JoinedLinear(_pack(f"{path}.{'+'.join(names)}", linears, packer))
    start = 0
    for name, linear in zip(names, linears, strict=True):
        setattr(parent, name, JoinedPart(joined, start, start + linear.out_features))
        start += linear.out_features
    return 1


# ----------------------------------------------------------------------------------------------------------- embeddings
class TiedEmbedding(nn.Module):
    """Look up rows of the packed head."""

    def __init__(self, head: Linear, dtype: torch.dtype):
        super().__init__()
        self.head = head
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        return self.head.rows(ids).to(self.dtype)


class NarrowEmbedding(nn.Module):
    """Look up rows of a table that stays in 16 bits, and convert them to `dtype`."""

    def __init__(self, embedding: nn.Embedding, dtype: torch.dtype):
        super().__init__()
        self.embedding = embedding
        self.dtype = dtype

    def forward(self, ids: Tensor) -> Tensor:
        output: Tensor = self.embedding(ids).to(self.dtype)
        return output


def _convert_rest(model: PreTrainedModel, dtype: torch.dtype, device: torch.device) -> None:
    """Convert what is left (norms, biases, experts) to `dtype`; an embedding table keeps its dtype.

    In a 16-bit model, parameters that transformers keeps in float32 stay so. All of it is copied: a
    single view into the mapped checkpoint would keep the whole file in memory.
    """
    embedding = model.get_input_embeddings()
    kept: set[int] = set()
    narrow = dtype != torch.float32 and next(model.parameters()).dtype == dtype
    if type(embedding) is nn.Embedding and embedding.weight.dtype != dtype:
        kept.add(id(embedding.weight))
        model.set_input_embeddings(NarrowEmbedding(embedding, dtype))
    for parameter in model.parameters():
        if parameter.is_floating_point():
            stays = id(parameter) in kept or (narrow and parameter.dtype == torch.float32)
            parameter.data = parameter.data.to(
                device, parameter.dtype if stays else dtype, copy=True
            )
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device != device:
                setattr(module, name, buffer.to(device))
