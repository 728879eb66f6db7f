"""Read a GGUF file as a checkpoint's weights, for Llama, Mistral, Qwen2 and Qwen3.

The folder also has the config.json and the tokenizer of the original model. Tensor names differ
from transformers', and the rows of Llama's queries and keys are interleaved in pairs, as llama.cpp
rotates them.

Shapes: N output features, K input features.
"""

from __future__ import annotations

from pathlib import Path

import gguf
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from motet_kernels.linear.group_weights import GroupWeights
from motet_shared.errors import ConfigError

from ..coded_linear import checked
from .blocks import KINDS, read_blocks
from .header import Header, TensorPlace, read_header
from .values import PLAIN, read_bytes, read_plain

# model_type → llama.cpp's architecture.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_TURNED = ("q_proj", "k_proj")
_IGNORED = {"rope_freqs.weight"}  # config.json has the same information


class GgufFile:
    """Read tensors by the names that transformers gives them.

    Raises ConfigError for a file of another model.
    """

    def __init__(self, path: Path, config: PreTrainedConfig):
        header = read_header(path)
        self._path, self._config = path, config
        self._tensors = header.tensors
        self.left = set(self._tensors) - _IGNORED
        self._architecture = self._check(header)
        number = next(
            key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self._architecture
        )
        self._names = gguf.get_tensor_name_map(number, config.num_hidden_layers)

    def _check(self, header: Header) -> str:
        """Return the architecture.

        Raises ConfigError where the file's own metadata contradict config.json.
        """
        config, where = self._config, self._path.name
        wanted = ARCHITECTURES.get(config.model_type)
        if wanted is None:
            known = ", ".join(ARCHITECTURES)
            raise ConfigError(
                f"{where}: GGUF of model_type={config.model_type!r} is not read, of {known} it is"
            )
        found = header.architecture
        if found != wanted:
            raise ConfigError(
                f"{where}: general.architecture is {found!r}, config.json asks for {wanted!r}"
            )
        for key, due in (
            ("block_count", config.num_hidden_layers),
            ("embedding_length", config.hidden_size),
            ("attention.head_count", config.num_attention_heads),
        ):
            if header.get(key, due) != due:
                raise ConfigError(
                    f"{where}: {wanted}.{key} is {header.get(key)}, config.json says {due}"
                )
        return wanted

    def _find(self, name: str) -> TensorPlace | None:
        module, _, kind = name.rpartition(".")
        gguf_name = self._names.get_name(module)
        return None if gguf_name is None else self._tensors.get(f"{gguf_name}.{kind}")

    def has(self, module: str) -> bool:
        """Return True if the module's weight is quantized."""
        tensor = self._find(f"{module}.weight")
        return tensor is not None and tensor.kind not in PLAIN

    def read(self, module: str, features: int, inputs: int) -> GroupWeights:
        """Return the weights of a module.

        Raises ConfigError that names a tensor which is misshapen or of an unknown type.
        """
        tensor = self._find(f"{module}.weight")
        assert tensor is not None
        self.left.discard(tensor.name)
        kind, shape = tensor.kind, tensor.shape
        if kind not in KINDS:
            raise ConfigError(
                f"{tensor.name} is {kind}; {', '.join(KINDS)} are read: quantize it to one of these"
            )
        if shape != (features, inputs):
            raise ConfigError(
                f"{tensor.name} is {list(shape)}, not {[features, inputs]}, which config.json asks for"
            )
        rows = read_bytes(tensor).reshape(features, -1)
        read = read_blocks(kind, rows)
        weights = checked(tensor.name, *read[:4], levels=read.levels)
        order_N = self._order(module, features)
        return weights if order_N is None else weights.permuted(order_N)

    def take(self, name: str) -> Tensor | None:
        """Return an unquantized tensor; None if there is none.

        Raises ConfigError if it holds NaN or infinity.
        """
        tensor = self._find(name)
        if tensor is None or tensor.kind not in PLAIN:
            return None
        self.left.discard(tensor.name)
        plain = read_plain(tensor)
        if not bool(plain.isfinite().all()):
            raise ConfigError(f"{tensor.name} holds NaN or infinity; copy {self._path.name} again")
        order_N = self._order(name.rpartition(".")[0], len(plain))
        return plain if order_N is None else plain[order_N]

    def _order(self, module: str, features: int) -> Tensor | None:
        """Return the indices of transformers' rows among llama.cpp's; None if they are the same."""
        last = module.rpartition(".")[2]
        if self._architecture != "llama" or last not in _TURNED:
            return None
        heads = (
            self._config.num_attention_heads
            if last == "q_proj"
            else self._config.num_key_value_heads
        )
        places = torch.arange(features).view(heads, -1, 2)  # per head, pairs that rotate together
        return places.transpose(1, 2).flatten()
