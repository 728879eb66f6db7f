"""Load quantized checkpoints, leaving their matrices in codes.

The format is named by `quantization_config.quant_method` in config.json (`METHODS`), or is a GGUF
file instead of safetensors. transformers would need a separate library for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from motet_kernels.linear.linear import Linear
from motet_shared.errors import ConfigError

from .bits_and_bytes import BitsAndBytes
from .coded_experts import Codes, put_experts
from .coded_linear import CodedEmbedding, CodedLinear, CodeSource
from .compressed_tensors import Compressed
from .float8_blocks import Float8Blocks
from .gptq import Awq, Gptq
from .mxfp4 import Mxfp4
from .published_names import renaming
from .tensor_files import TensorFiles

METHODS: dict[str, Any] = {
    "gptq": Gptq,
    "awq": Awq,
    "compressed-tensors": Compressed,
    "fp8": Float8Blocks,
    "bitsandbytes": BitsAndBytes,
    "mxfp4": Mxfp4,
}

_ABSORBED = ".kv_b_proj"  # DeepSeek's and others' latent attention (attention/latent.py)


class Plain(Protocol):
    """Read all other tensors by name. left: the names that have not been read."""

    left: set[str]

    def take(self, name: str) -> Tensor | None: ...


def settings_of(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return the config's quantization_config; None if it has none."""
    found = getattr(config, "quantization_config", None)
    return found if found is None or isinstance(found, dict) else found.to_dict()


def refusal(config: PreTrainedConfig) -> str | None:
    """Return why a checkpoint's quantization is unsupported; None if it is read or undeclared."""
    settings = settings_of(config)
    if settings is None or settings.get("quant_method") in METHODS:
        return None
    known = ", ".join(METHODS)
    return (
        f"quantization_config.quant_method={settings.get('quant_method')!r} is not read; "
        f"give {known}, a GGUF file, or the original weights"
    )


def gguf_path(folder: Path) -> Path | None:
    """Return the GGUF file of a folder without safetensors; None if there is none.

    Raises ConfigError if there are several.
    """
    files = sorted(folder.glob("*.gguf"))
    if not files or next(folder.glob("*.safetensors"), None) is not None:
        return None
    if len(files) > 1:
        raise ConfigError(
            f"{folder}: {', '.join(file.name for file in files)}: keep one GGUF file in a folder"
        )
    return files[0]


def is_quantized(folder: Path, config: PreTrainedConfig) -> bool:
    """Return True if a checkpoint is to be loaded by `load`."""
    return settings_of(config) is not None or gguf_path(folder) is not None


def load(
    folder: Path,
    config: PreTrainedConfig,
    found: Any,
    dtype: torch.dtype,
    *,
    verified: bool = False,
) -> PreTrainedModel:
    """Return a model of the class `found`, with matrices in their codes and all else in `dtype`.

    verified: the same files have been loaded before; codes are read when they are needed. Raises
    ConfigError that names every tensor which is missing, left over or misshapen.
    """
    codes, plain = _open(folder, config, found.__name__)
    settings = config.__dict__.pop(
        "quantization_config", None
    )  # transformers would import a library for it
    config._attn_implementation = "eager"
    with _without_memory():
        model: PreTrainedModel = found(config)
    if settings is not None:
        config.quantization_config = settings
    tied = bool(getattr(config, "tie_word_embeddings", False))
    put_experts(model, codes, lazy=verified)
    done = _put_codes(model, codes, dtype, tied, verified)
    if not verified:
        _drop_unused(model, plain)
    faults = list(_put_plain(model, plain, dtype, tied, done))
    if not verified:
        faults += [f"unknown {name}" for name in sorted(plain.left)]
    if faults:
        more = f"; and {len(faults) - 8} more" if len(faults) > 8 else ""
        hint = (
            " (experts in codes are not read)"
            if any(".experts." in fault for fault in faults)
            else ""
        )
        raise ConfigError(
            f"{folder}: the weights contradict config.json: {'; '.join(faults[:8])}{more}{hint}"
        )
    return model.eval().requires_grad_(False)


def _open(folder: Path, config: PreTrainedConfig, class_name: str) -> tuple[Codes, Plain]:
    path = gguf_path(folder)
    if path is not None:
        from .gguf.file import GgufFile

        opened = GgufFile(path, config)
        return opened, opened
    files = TensorFiles(folder, renaming(config.model_type, class_name))
    settings = settings_of(config) or {}
    codes: Codes = METHODS[settings["quant_method"]](settings, files)
    return codes, files


@contextmanager
def _without_memory() -> Iterator[None]:
    """Create parameters of new modules without memory within the block.

    Buffers are allocated, since the checkpoint does not contain them.
    """
    module_class: Any = nn.Module
    register = module_class.register_parameter

    def register_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.data.to("meta"), requires_grad=False)
        register(module, name, parameter)

    module_class.register_parameter = register_meta
    try:
        yield
    finally:
        module_class.register_parameter = register


def _put_codes(
    model: PreTrainedModel, codes: Codes, dtype: torch.dtype, tied: bool, lazy: bool
) -> set[str]:
    """Replace linear layers and the embedding table that are quantized.

    lazy: their codes are read when they are needed.

    Returns the weights that are dequantized instead: those which latent attention absorbs.
    """
    done = set()
    linears = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, Conv1D)
    ]
    for name, linear in linears:
        if codes.has(name):
            sizes = _sizes(linear)
            source = CodeSource(sizes, partial(codes.read, name, *sizes))
            if not lazy:
                source()
            if name.endswith(_ABSORBED):
                _set(model, f"{name}.weight", source().dense().to(dtype))
                done.add(f"{name}.weight")
                continue
            bias = (
                None if linear.bias is None else torch.empty(0)
            )  # filled with the unquantized tensors
            model.set_submodule(name, CodedLinear(name, source, bias))
    table = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is table)
    if isinstance(table, nn.Embedding) and codes.has(name):
        sizes = (table.num_embeddings, table.embedding_dim)
        source = CodeSource(sizes, partial(codes.read, name, *sizes))
        if not lazy:
            source()
        model.set_input_embeddings(CodedEmbedding(source, dtype, _scale_of(table)))
        if tied:
            model.set_output_embeddings(CodedLinear(name, source, None))
    return done


def _scale_of(table: nn.Embedding) -> float:
    """Return what a family multiplies its embeddings by. Raises ConfigError for other changes."""
    if type(table) is nn.Embedding:
        return 1.0
    scale: Any = getattr(table, "embed_scale", None)
    if scale is None:
        raise ConfigError(
            f"{type(table).__name__}: a quantized table of this kind is not read; "
            "give the original weights"
        )
    return float(scale)


def _sizes(linear: Any) -> tuple[int, int]:
    """Return a layer's output and input features."""
    if isinstance(linear, Conv1D):  # GPT-2's, with its matrix turned
        return linear.nf, linear.nx
    return linear.out_features, linear.in_features


def _put_plain(
    model: PreTrainedModel, plain: Plain, dtype: torch.dtype, tied: bool, done: set[str]
) -> Iterator[str]:
    """Fill all other parameters, but those in `done`, and the biases.

    Yields what is missing or misshapen.
    """
    for name, module in model.named_modules():
        if isinstance(module, CodedLinear) and module.bias is not None:
            bias = plain.take(f"{name}.bias")
            if bias is None or bias.shape != (module.out_features,):
                yield f"{name}.bias is {None if bias is None else list(bias.shape)}, not {[module.out_features]}"
            else:
                module.bias = bias.to(dtype)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    if tied and isinstance(head, nn.Linear) and isinstance(table, nn.Embedding):
        head.weight = table.weight
    for name, parameter in list(model.named_parameters()):
        if name in done:
            continue
        tensor = plain.take(name)
        if tensor is None:
            yield f"missing {name}"
        elif tensor.shape != parameter.shape:
            yield f"{name} is {list(tensor.shape)}, not {list(parameter.shape)}"
        else:
            _set(model, name, tensor.to(dtype))
    yield from _put_buffers(model, plain)
    if tied and isinstance(head, nn.Linear) and isinstance(table, nn.Embedding):
        head.weight = table.weight
        for name, module in model.named_modules():
            if module is head:
                plain.left.discard(f"{name}.weight")
    yield from (f"missing {name}" for name, buffer in model.named_buffers() if buffer.is_meta)


def _put_buffers(model: nn.Module, plain: Plain) -> Iterator[str]:
    """Fill buffers that the checkpoint has, such as biases of routers."""
    persistent = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        tensor = plain.take(name) if name in persistent else None
        if tensor is None:
            continue
        if tensor.shape != buffer.shape:
            yield f"{name} is {list(tensor.shape)}, not {list(buffer.shape)}"
        else:
            buffer.copy_(tensor)


def _drop_unused(model: nn.Module, plain: Plain) -> None:
    """Drop tensors that change nothing, which published checkpoints contain.

    These are biases of zeros where the model has none, as AutoGPTQ writes them, and the frequencies
    of rotary embeddings, which config.json determines.
    """
    for name in list(plain.left):
        module, _, last = name.rpartition(".")
        if last == "inv_freq" and module.endswith("rotary_emb"):
            plain.left.discard(name)
        elif last == "bias" and _has_no_bias(model, module):
            bias = plain.take(name)
            if bias is not None and bool(bias.any()):
                plain.left.add(name)


def _has_no_bias(model: nn.Module, name: str) -> bool:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        return False
    return isinstance(module, CodedLinear) and module.bias is None


def _set(model: nn.Module, name: str, tensor: Tensor) -> None:
    module, _, last = name.rpartition(".")
    setattr(model.get_submodule(module), last, nn.Parameter(tensor, requires_grad=False))


def formats(model: nn.Module) -> str:
    """Return the formats of quantized matrices with their counts: "int4:32 (96), int8:16 (17)"."""
    found = [module.format for module in model.modules() if isinstance(module, Linear)]
    count = Counter(form for form in found if ":" in form)  # others were quantized here
    return ", ".join(f"{form} ({number})" for form, number in sorted(count.items()))
