"""Read a GGUF file as a checkpoint's weights, by the names that transformers gives its tensors.

The folder also has the config.json and the tokenizer of the original model, or those that were made
of the file (`folder.py`). What llama.cpp stores differently is in `layout.py`.

Shapes: N output features, K input features, E experts.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import gguf
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from motet_kernels.linear.gguf_blocks import KINDS, read_blocks
from motet_kernels.linear.group_weights import GroupWeights, can_join, joined
from motet_shared.errors import ConfigError

from ..coded_linear import checked
from .header import Header, TensorPlace, read_header
from .hybrids import decoder_layers
from .layout import LAYOUTS, Layout
from .values import PLAIN, read_bytes, read_plain

# config.json has the same information.
_IGNORED = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
_EXPERTS = re.compile(r"(?P<experts>.+\.experts)\.(?P<part>gate_up_proj|down_proj)(?P<bias>_bias)?")
_NORM_OF_HEAD = re.compile(r"(?P<module>.+_layernorm)\.norms\.(?P<head>\d+)\.weight")


class GgufFile:
    """Read tensors by the names that transformers gives them.

    Raises ConfigError for a file of another model.
    """

    def __init__(self, path: Path, config: PreTrainedConfig):
        header = read_header(path)
        self._path, self._config = path, config
        self._layout = self._check(header)
        layers = config.num_hidden_layers
        beyond = tuple(
            f"blk.{layer}." for layer in range(layers, header.get("block_count", layers))
        )
        self._tensors = header.tensors
        # Layers beyond the decoder's predict further tokens, which only speculation needs.
        self.left = {
            name for name in self._tensors if name not in _IGNORED and not name.startswith(beyond)
        }
        number = next(
            key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == self._layout.architecture
        )
        self._names = gguf.get_tensor_name_map(number, layers)

    def _check(self, header: Header) -> Layout:
        """Return the layout of the architecture.

        Raises ConfigError where the file's own metadata contradict config.json.
        """
        config, where = self._config, self._path.name
        layout = LAYOUTS.get(config.model_type)
        if layout is None:
            known = ", ".join(LAYOUTS)
            raise ConfigError(
                f"{where}: GGUF of model_type={config.model_type!r} is not read, of {known} it is"
            )
        wanted, found = layout.architecture, header.architecture
        layers = None if header.get("block_count") is None else decoder_layers(header)
        if found != wanted:
            raise ConfigError(
                f"{where}: general.architecture is {found!r}, config.json asks for {wanted!r}"
            )
        for key, stated, due in (
            ("block_count", layers, config.num_hidden_layers),
            ("embedding_length", header.get("embedding_length"), config.hidden_size),
            (
                "attention.head_count",
                header.get("attention.head_count"),
                config.num_attention_heads,
            ),
        ):
            if stated not in (None, due):
                raise ConfigError(f"{where}: {wanted}.{key} is {stated}, config.json says {due}")
        return layout

    def _find(self, name: str) -> TensorPlace | None:
        for ours, theirs in self._layout.names:
            if name.endswith(ours):
                name = name.removesuffix(ours) + theirs
        whole = self._names.get_name(name)
        if whole is not None and whole in self._tensors:
            return self._tensors[whole]
        module, _, kind = name.rpartition(".")
        gguf_name = self._names.get_name(module)
        return None if gguf_name is None else self._tensors.get(f"{gguf_name}.{kind}")

    def _stacks(self, name: str) -> list[TensorPlace]:
        """Return the tensors of all experts that a parameter consists of; none if it is no such."""
        match = _EXPERTS.fullmatch(name)
        down = match and self._names.get_name(f"{match['experts']}.down_proj")
        if match is None or down is None:
            return []
        wholes = [down] if match["part"] == "down_proj" else [down.replace("_down_", "_gate_up_")]
        halves = [down.replace("_down_", part) for part in ("_gate_", "_up_")]
        end = ".bias" if match["bias"] else ".weight"
        for names in (wholes, halves if match["part"] == "gate_up_proj" else []):
            found = [self._tensors.get(f"{one}{end}") for one in names]
            if found and all(found):
                return [place for place in found if place is not None]
        return []

    def has(self, module: str) -> bool:
        """Return True if the weight of `module`, or any stack of its experts, is quantized."""
        if _EXPERTS.fullmatch(module):
            return any(place.kind not in PLAIN for place in self._stacks(module))
        tensor = self._find(f"{module}.weight")
        return tensor is not None and tensor.kind not in PLAIN

    def read(self, module: str, features: int, inputs: int) -> GroupWeights:
        """Return the weights of a module.

        Raises ConfigError that names a tensor which is misshapen or of an unknown type.
        """
        tensor = self._find(f"{module}.weight")
        assert tensor is not None
        self._check_shape(tensor, (features, inputs))
        return self._arranged(module, _weights(tensor, tensor.name))

    def read_stack(self, name: str, experts: int, features: int, inputs: int) -> list[GroupWeights]:
        """Return the weights of each expert; raises ConfigError as `read` does."""
        places = self._stacks(name)
        for place in places:
            self._check_shape(place, (experts, features // len(places), inputs))
        return [self._arranged(name, self._of_expert(places, one)) for one in range(experts)]

    def _of_expert(self, places: list[TensorPlace], number: int) -> GroupWeights:
        parts = [_weights(_part(place, number), place.name) for place in places]
        if not can_join(parts):
            kinds = ", ".join(f"{place.name} is {place.kind}" for place in places)
            raise ConfigError(f"{kinds}; they must be of one type: quantize them alike")
        return joined(parts) if len(parts) > 1 else parts[0]

    def _check_shape(self, tensor: TensorPlace, shape: tuple[int, ...]) -> None:
        self.left.discard(tensor.name)
        if tensor.kind not in KINDS:
            raise ConfigError(
                f"{tensor.name} is {tensor.kind}; {', '.join(KINDS)} are read: quantize it to one of these"
            )
        if tensor.shape != shape:
            raise ConfigError(
                f"{tensor.name} is {list(tensor.shape)}, not {list(shape)}, which config.json asks for"
            )

    def _arranged(self, module: str, weights: GroupWeights) -> GroupWeights:
        """Return weights with rows and inputs in transformers' order."""
        features, inputs = weights.codes_NK.shape
        order_N = self._layout.rows(self._config, module, features)
        order_K = self._layout.inputs(self._config, module, inputs)
        if order_K is not None:
            weights = replace(weights, order_K=order_K.argsort())
        return weights if order_N is None else weights.permuted(order_N)

    def take(self, name: str) -> Tensor | None:
        """Return an unquantized tensor; None if there is none.

        Raises ConfigError if it holds NaN or infinity.
        """
        if stacks := self._stacks(name):
            return self._take_stacks(name, stacks)
        if (match := _NORM_OF_HEAD.fullmatch(name)) is not None:
            whole = self.take(f"{match['module']}.weight")
            head = int(match["head"])
            return None if whole is None or whole.dim() < 2 else whole[head : head + 1].flatten()
        plain = None if (tensor := self._find(name)) is None else self._read(tensor)
        if plain is None:
            return None
        module, _, last = name.rpartition(".")
        module = module if last in ("weight", "bias") else name
        plain = self._layout.values(name, plain)
        order_N = self._layout.rows(self._config, module, len(plain))
        if plain.dim() == 2:
            order_K = self._layout.inputs(self._config, module, plain.shape[1])
            plain = plain if order_K is None else plain[:, order_K]
        return plain if order_N is None else plain[order_N]

    def _take_stacks(self, name: str, places: list[TensorPlace]) -> Tensor | None:
        """Return a parameter of all experts, rows in transformers' order."""
        parts = [part for place in places if (part := self._read(place)) is not None]
        if len(parts) < len(places):
            return None
        whole = torch.cat(parts, dim=1)
        order_N = self._layout.rows(self._config, name.removesuffix("_bias"), whole.shape[1])
        whole = whole if order_N is None else whole[:, order_N]
        turned = self._layout.turned and whole.dim() == 3
        return whole.transpose(1, 2).contiguous() if turned else whole

    def _read(self, tensor: TensorPlace) -> Tensor | None:
        """Return the numbers of a tensor; None if it is quantized."""
        if tensor.kind not in PLAIN:
            return None
        self.left.discard(tensor.name)
        plain = read_plain(tensor)
        if not bool(plain.isfinite().all()):
            raise ConfigError(f"{tensor.name} holds NaN or infinity; copy {self._path.name} again")
        return plain


def _part(place: TensorPlace, number: int) -> TensorPlace:
    """Return one matrix of a stack of them."""
    nbytes = place.nbytes // place.shape[0]
    start = place.start + number * nbytes
    return replace(place, shape=place.shape[1:], start=start, nbytes=nbytes)


def _weights(tensor: TensorPlace, name: str) -> GroupWeights:
    read = read_blocks(tensor.kind, read_bytes(tensor).reshape(tensor.shape[0], -1))
    return checked(name, *read[:4], levels=read.levels, narrow=read.narrow)
