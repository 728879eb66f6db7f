"""Run recurrent mixers: layers with a state of fixed size instead of keys and values.

A mixer takes the packed rows of a step and gets its state from the step's layout:
`layout.recurrent(layer, shapes, dtype)`. `motet_kernels.recurrent.scans` advances it over all rows at
once, each from the state after its previous tokens, so the result does not depend on where a prompt
is split. States are float32 whatever the model's dtype, because errors in them add up.

The layout is the keyword argument `layout` of the model's call, as it is for attention. Decoder
layers of some families (such as Jamba) do not pass keyword arguments on to their mixer, so a hook
on the model records it for all.

`install` replaces transformers' own mixers, which handle one sequence at a time. The modules inside
(projections, norms) are kept under the same names. Each kind of replacement is compared with the
original, so a mixer that a release of transformers computes in another way is refused, not run.

Shapes: N packed tokens, B rows, P slots, C channels, K taps of a convolution, X hidden size.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.utils import logging

from motet_kernels import gates
from motet_kernels.recurrent.packed_rows import PackedRows
from motet_kernels.recurrent.scans import conv_scan
from motet_shared.errors import ConfigError

# Methods by which transformers' mixers keep state: a forward that uses one of them is recurrent.
STATE_CALLS = {
    "update_conv_state",
    "update_recurrent_state",
    "get_conv_state",
    "get_recurrent_state",
}


@dataclass(slots=True)
class Recurrent:
    """Hold the states of a layer, and the slots that a step's rows use.

    `states` are tensors `[slots, *shape]`, updated in place. A slot belongs to a running sequence,
    is zero at its start, and summarizes all of its tokens: a copy is a snapshot of the sequence at
    that token. `rows` says which slots the packed tokens advance.
    """

    states: tuple[Tensor, ...]
    rows: PackedRows


class RecurrentLayout(Protocol):
    """Require what a recurrent layer needs of the step's layout."""

    def recurrent(
        self, layer: int, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype
    ) -> Recurrent:
        """Return the states of `layer`, of these shapes per slot: in every step the same ones."""
        ...


@dataclass(slots=True)
class LayoutRecorder:
    """Hold the layout of the current model call."""

    layout: RecurrentLayout | None = None

    def note(self, _module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
        self.layout = kwargs.get("layout")


class Mixer(nn.Module):
    """Replace the recurrent module `original`. Subclasses set `shapes` and implement `mix`."""

    shapes: tuple[tuple[int, ...], ...]

    def __init__(self, original: nn.Module, step: LayoutRecorder):
        super().__init__()
        self.layer_idx: int = original.layer_idx  # type: ignore[assignment]
        self.step = step

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> Tensor:
        """Return the output; input and output are `[1, N, hidden]`.

        Raises ConfigError without a layout, and for a mask: packed rows have no padding.
        """
        if self.step.layout is None or attention_mask is not None:
            what = (
                "no step layout"
                if self.step.layout is None
                else "a padding mask, but packed rows have no padding"
            )
            raise ConfigError(f"{type(self).__name__} of layer {self.layer_idx} got {what}")
        state = self.step.layout.recurrent(self.layer_idx, self.shapes, torch.float32)
        return self.mix(hidden_states[0], state).unsqueeze(0)

    def mix(self, hidden_NX: Tensor, state: Recurrent) -> Tensor:
        raise NotImplementedError


class CausalConv(nn.Module):
    """Compute a depthwise causal convolution over packed rows, replacing `conv`.

    Its state is the last K - 1 inputs. Raises ConfigError for any other kind of convolution.
    """

    taps_KC: Tensor
    bias_C: Tensor | None

    def __init__(self, conv: nn.Conv1d):
        super().__init__()
        taps = conv.kernel_size[0]
        plain = conv.stride == conv.dilation == (1,) and conv.padding == (taps - 1,)
        if conv.groups != conv.in_channels or not plain:
            raise ConfigError(f"{conv} is not a depthwise causal convolution: not supported")
        bias = None if conv.bias is None else conv.bias.detach().float()
        self.register_buffer(
            "taps_KC", conv.weight.detach()[:, 0].T.float().contiguous(), persistent=False
        )
        self.register_buffer("bias_C", bias, persistent=False)
        self.state_shape = (taps - 1, conv.in_channels)

    def forward(self, x_NC: Tensor, state_PKC: Tensor, rows: PackedRows) -> Tensor:
        """Return float32, whatever the input's dtype."""
        bias_C = None if self.bias_C is None else self.bias_C.float()
        return conv_scan(state_PKC, rows, x_NC.float(), self.taps_KC.float(), bias_C)


def activation(act: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return `act` for float32 rows, as a kernel where there is one."""
    return gates.silu if isinstance(act, nn.SiLU | SiLUActivation) else act


def install(model: PreTrainedModel, mixers: dict[str, type[Mixer]]) -> int:
    """Replace the recurrent modules of a loaded model by `mixers`, and return how many.

    `mixers` is keyed by the name of the replaced class. Raises ConfigError for a recurrent module
    without a mixer, and for one whose mixer computes something else.
    """
    step = LayoutRecorder()
    count = 0
    compared: set[type] = set()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            kind = type(child)
            if not _is_recurrent(child):
                continue
            if kind.__name__ not in mixers:
                raise ConfigError(f"{kind.__name__} is a recurrent layer that is not supported")
            if kind not in compared:
                _compare(child, mixers[kind.__name__])
                compared.add(kind)
            setattr(parent, name, mixers[kind.__name__](child, step))
            count += 1
    if count:
        model.register_forward_pre_hook(step.note, with_kwargs=True)
    return count


def _is_recurrent(module: nn.Module) -> bool:
    if isinstance(module, Mixer):
        return False
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and not STATE_CALLS.isdisjoint(code.co_names)


class _OneSequence:
    """Provide a layout of one sequence in one slot, for a chunk of `count` tokens."""

    def __init__(self) -> None:
        self.count = 0
        self._states: tuple[Tensor, ...] | None = None

    def recurrent(
        self, layer: int, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype
    ) -> Recurrent:
        if self._states is None:
            self._states = tuple(torch.zeros(1, *shape, dtype=dtype) for shape in shapes)
        return Recurrent(
            self._states, PackedRows(torch.zeros(1, dtype=torch.long), [0, self.count])
        )


@torch.inference_mode()
def _compare(module: nn.Module, mixer: type[Mixer]) -> None:
    """Raise ConfigError unless module and mixer agree on six tokens.

    The mixer computes them as chunks of four, one and one. Both run in float32, on a copy.
    """
    layout = _OneSequence()
    original = copy.deepcopy(module).float().eval()
    replacement = mixer(original, LayoutRecorder(layout))
    out: nn.Linear = getattr(original, "out_proj", None) or original.o_proj  # type: ignore[assignment]
    hidden = torch.randn(1, 6, out.out_features, generator=torch.Generator().manual_seed(0))
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # no advice to install faster kernels for code that runs once
    expected = original(hidden)
    logging.set_verbosity(verbosity)
    parts = []
    for part in hidden.split([4, 1, 1], dim=1):
        layout.count = part.shape[1]
        parts.append(replacement(part))
    scale = expected.abs().nan_to_num(0, 0, 0).max().item()
    if not torch.allclose(torch.cat(parts, dim=1), expected, 1e-3, 1e-3 * scale, equal_nan=True):
        raise ConfigError(
            f"{type(module).__name__} is not what {mixer.__name__} computes: not supported"
        )
