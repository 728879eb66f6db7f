"""Check from its behavior, not its name, that paged attention computes a loaded model exactly.

Six tokens go through the model twice. A probing attention function sees what every layer asks for,
and a probing mask function returns the rules of the masks instead of masks. A model is exact if

* each layer attends once per token, causally, and its mask is that of a window, of chunks, or of
  none;
* no argument reaches the attention function that the engine does not know (indices of a sparse
  attention, biases);
* outside of the attention function tokens are independent: in another order, next to others, each
  gives the same logits, so only its id and its position matter.

Keyword arguments that are lost on the way are restored: a window or chunks that are in the mask but
not passed to the attention function (Qwen2-MoE, Phi-3.5-MoE, Llama 4), or the step's layout
(Nemotron). Scales of queries that a module derives from indices in the batch (Llama 4) are left to
the attention function, which knows positions.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from motet_kernels.recurrent.packed_rows import PackedRows
from motet_llm.attention.options import AttentionOptions, Reach, Temperature
from motet_shared.errors import ConfigError

from .recurrent import Recurrent

NAME = "motet_probe"
TOKENS = 6
ORDER = [3, 0, 4, 1, 5, 2]  # every token changes its index and its left neighbor
TOLERANCE = {torch.float32: 1e-3}
COARSE_TOLERANCE = 0.1  # for 16-bit dtypes

HARMLESS = set(
    "dropout output_attentions output_hidden_states output_router_logits position_ids use_cache".split()
)
REASONS = {
    "indices": "it attends to the tokens that an indexer of its own selects (sparse attention)",
    "block_indices": "it attends to the blocks that an indexer of its own selects (sparse attention)",
}

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Refusal(Exception):
    """Give the reason why a model cannot be computed exactly."""


@dataclass
class LayerProbe:
    """Record the arguments of one layer's attention call.

    reach: that of its mask.
    passed: the reach that the attention function receives.
    """

    module: nn.Module
    reach: Reach
    passed: Reach
    has_layout: bool
    softcap: float | None = None
    sinks_H: Tensor | None = None

    @property
    def complete(self) -> bool:
        return self.has_layout and self.reach == self.passed


@dataclass
class Probe:
    """Provide the layout of a probing step, in which every token is a sequence of its own.

    Positions below `context` matter. Masks are examined only with `in_order`: otherwise
    transformers takes the positions for those of several sequences.
    """

    context: int
    in_order: bool = True
    layers: dict[int, LayerProbe] = field(default_factory=dict)
    recurrent_layers: set[int] = field(default_factory=set)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        options: AttentionOptions,
    ) -> Tensor:
        """Mix each token's own query, key and value: an error in any of them changes the logits."""
        groups = query.shape[1] // key.shape[1]
        marks = torch.linspace(-1, 1, query.shape[-1], dtype=query.dtype, device=query.device)
        score_1HN1 = ((query + key.repeat_interleave(groups, 1)) * marks).mean(-1, keepdim=True)
        return (
            (value.repeat_interleave(groups, 1) * (1 + score_1HN1.tanh() / 2))
            .transpose(1, 2)
            .contiguous()
        )

    def recurrent(
        self, layer: int, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype
    ) -> Recurrent:
        self.recurrent_layers.add(layer)
        states = tuple(torch.zeros(TOKENS, *shape, dtype=dtype) for shape in shapes)
        return Recurrent(states, PackedRows(torch.arange(TOKENS), list(range(TOKENS + 1))))

    def note(self, seen: LayerProbe) -> int:
        layer = getattr(seen.module, "layer_idx", None)
        if not isinstance(layer, int):
            raise Refusal(
                f"{type(seen.module).__name__} does not say which layer it is (layer_idx)"
            )
        if layer in self.layers:
            raise Refusal(f"layer {layer} attends more than once per token")
        self.layers[layer] = seen
        return layer


_probing = threading.local()  # the probe of the forward pass in this thread


def examine(model: PreTrainedModel, context: int) -> dict[int, LayerProbe]:
    """Check that the engine computes `model` exactly up to `context` tokens.

    Lost keyword arguments are restored. Returns what each attending layer asked for, by layer. The
    model is left with an attention function that only works here. Raises ConfigError that names the
    reason.
    """
    use(model, NAME, probing_attention)
    AttentionMaskInterface.register(NAME, _rule_instead_of_mask)
    for module in model.modules():
        _take_temperature(module)
    try:
        probe = _probe(model, context)
        if not all(seen.complete for seen in probe.layers.values()):
            _restore_layout(model, probe)
            probe = _probe(model, context)
            if incomplete := [s for s in probe.layers.values() if not s.complete]:
                raise Refusal(f"{type(incomplete[0].module).__name__} drops keyword arguments")
        _check_cache(model, probe)
        return probe.layers
    except Refusal as refusal:
        raise ConfigError(
            f"model_type={model.config.model_type!r} is not supported: {refusal}"
        ) from refusal


def _take_temperature(module: Any) -> None:
    """Turn off a module's own scales of queries, which depend on indices in the batch.

    The attention function applies them by the tokens' positions.
    """
    if not getattr(module, "attn_temperature_tuning", False):
        return
    module.attn_temperature_tuning = False
    if not getattr(module, "use_rope", False):
        module.temperature = Temperature(float(module.floor_scale), float(module.attn_scale))


def is_unchanged(model: PreTrainedModel) -> bool:
    """Return True if `examine` had to change nothing, so that the same files need no examination."""
    return not any(
        module._forward_pre_hooks or isinstance(getattr(module, "temperature", None), Temperature)
        for module in model.modules()
    )


def use(model: PreTrainedModel, name: str, function: Callable[..., tuple[Tensor, Any]]) -> None:
    """Make all of the model's attention modules call `function`, registered as `name`."""
    AttentionInterface.register(name, function)
    for module in model.modules():
        if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
            config._attn_implementation = name


def _probe(model: PreTrainedModel, context: int) -> Probe:
    probe = Probe(context)
    ids, positions = (
        torch.arange(TOKENS) * 7 % model.config.get_text_config().vocab_size,
        torch.arange(TOKENS),
    )
    logits_NV = _run(model, probe, ids, positions)
    if not probe.layers:
        raise Refusal(
            "no layer attends: models without a KV cache are not served"
            if probe.recurrent_layers
            else f"{type(model).__name__} takes no attention function from outside"
        )
    if not bool(logits_NV.isfinite().all()):
        raise Refusal(
            "its logits are NaN or infinite; repair the numbers of config.json, or give the original weights"
        )
    order = torch.tensor(ORDER)
    reordered_NV = _run(model, Probe(context, in_order=False), ids[order], positions[order])
    deviation_N = (reordered_NV - logits_NV[order]).norm(dim=-1) / logits_NV[order].norm(dim=-1)
    # The median, because a token whose experts tie may be routed either way.
    if deviation_N.median() > TOLERANCE.get(model.dtype, COARSE_TOLERANCE):
        raise Refusal(
            "its tokens see each other outside of attention, or their positions do not come from position_ids"
        )
    return probe


@torch.inference_mode()
def _run(model: PreTrainedModel, probe: Probe, ids_N: Tensor, positions_N: Tensor) -> Tensor:
    with _registered(probe):
        try:
            output = model(
                input_ids=ids_N.unsqueeze(0),
                position_ids=positions_N.unsqueeze(0),
                use_cache=False,
                logits_to_keep=torch.arange(TOKENS),
                layout=probe,
            )
        except Refusal:
            raise
        except Exception as error:
            raise Refusal(f"its model code fails on {TOKENS} tokens of text: {error}") from error
    if output.logits.shape[1] != TOKENS:
        raise Refusal("it computes the logits of other tokens than those asked for")
    logits: Tensor = output.logits[0].float()
    return logits


@contextmanager
def _registered(probe: Probe) -> Iterator[None]:
    _probing.probe = probe
    try:
        yield
    finally:
        del _probing.probe


def probing_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Any = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    attention_chunk: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    probe: Probe = _probing.probe
    if is_causal is False or not getattr(module, "is_causal", True):
        raise Refusal(f"{type(module).__name__} looks at later tokens")
    unknown = [
        name
        for name, value in others.items()
        if name not in HARMLESS and value is not None and value is not False
    ]
    if unknown:
        plain = f"{type(module).__name__} passes {', '.join(unknown)} to its attention function"
        raise Refusal(REASONS.get(unknown[0], plain))
    reach = reach_of(attention_mask, probe.context) if probe.in_order else Reach()
    passed = Reach(
        sliding_window if sliding_window is not None and sliding_window < probe.context else None,
        attention_chunk,
    )
    layer = probe.note(LayerProbe(module, reach, passed, layout is not None, softcap, s_aux))
    return probe.attend(layer, query, key, value, 1.0, AttentionOptions()), None


# --------------------------------------------------------------------------------------------------------------- masks
def _rule_instead_of_mask(
    *,
    q_length: int,
    kv_length: int,
    mask_function: Rule,
    local_size: int | None = None,
    use_vmap: bool,
    **_: Any,
) -> Tensor:
    """Return an empty mask that carries the rule by which it would have been filled."""
    mask = torch.zeros(1, 1, q_length, kv_length)
    mask.rule = None if use_vmap else mask_function  # type: ignore[attr-defined]
    mask.reach = local_size  # type: ignore[attr-defined]
    return mask


def reach_of(mask: Tensor | None, context: int) -> Reach:
    """Return which tokens the mask's rule shows a token, of at most `context` tokens.

    Rows around multiples of the rule's size are examined. Raises Refusal for a rule that is neither
    causal nor that of a window or of chunks.
    """
    rule: Rule | None = getattr(mask, "rule", None)
    if rule is None:
        raise Refusal(
            "it makes masks of its own" if mask is not None else "it attends without a mask"
        )
    reach = min(getattr(mask, "reach", None) or context, context)
    rows = {q for q in (0, 1, reach - 1, reach, reach + 1, 2 * reach, 3 * reach + 5) if q < context}
    queries_Q1 = torch.tensor(sorted(rows)).view(1, 1, -1, 1)
    last = max(rows)
    keys_1T = torch.arange(last + 1).view(1, 1, 1, -1)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long)
    try:
        visible_QT = rule(zero, zero, queries_Q1, keys_1T).expand(1, 1, len(rows), last + 1)[0, 0]
    except IndexError as error:
        raise Refusal("its masks depend on what the tokens are") from error
    window = int(visible_QT[-1].sum())
    distance_QT = (queries_Q1 - keys_1T)[0, 0]
    if torch.equal(visible_QT, (distance_QT >= 0) & (distance_QT < window)):
        return Reach() if window > last else Reach(window)
    same_QT = (queries_Q1 // reach == keys_1T // reach)[0, 0]
    if torch.equal(visible_QT, (distance_QT >= 0) & same_QT):
        return Reach(chunk=reach)
    raise Refusal("its masks are not causal, or have gaps")


def _check_cache(model: PreTrainedModel, probe: Probe) -> None:
    """Raise Refusal if transformers' own cache drops tokens that the masks show.

    The results of such a model depend on how it is called.
    """
    for layer, kept in enumerate(DynamicCache(config=model.config).layers):
        window = getattr(kept, "sliding_window", None)
        seen = probe.layers.get(layer)
        if window and seen and window < probe.context and window not in seen.reach:
            raise Refusal(
                f"its config has a window of {window} tokens, which the masks of layer {layer} have not"
            )


# --------------------------------------------------------------------------------------------- lost keyword arguments
class _Relay:
    """Pass the step's layout to modules behind those that drop keyword arguments."""

    layout: Any = None

    def record(self, _module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.layout = kwargs.get("layout")

    def restore(
        self, _module: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "layout": self.layout}


def _with_reach(
    _module: nn.Module, args: Any, kwargs: dict[str, Any], *, reach: Reach
) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "sliding_window": reach.window, "attention_chunk": reach.chunk}


def _restore_layout(model: PreTrainedModel, probe: Probe) -> None:
    relay = _Relay()
    model.register_forward_pre_hook(relay.record, with_kwargs=True)
    for seen in probe.layers.values():
        if not seen.has_layout:
            seen.module.register_forward_pre_hook(relay.restore, with_kwargs=True)
        if seen.reach != seen.passed:
            seen.module.register_forward_pre_hook(
                partial(_with_reach, reach=seen.reach), with_kwargs=True
            )
