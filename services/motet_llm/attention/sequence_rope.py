"""Rotate each token by the frequencies that belong to the length of its own sequence.

Two kinds of rotary embedding change their frequencies when a sequence outgrows the length for which
a model was made. transformers derives them from the longest sequence of a batch:

* `longrope` (Phi-3) has two sets of factors. A sequence within the original length is rotated by
  the short ones, a longer one by the long ones: all of its keys, so that keys computed before are
  computed again when it crosses that length (`rope_switch`). So does `generate` of Phi-3, and of
  every class with `use_cache=False`; with a cache, other classes mix keys of both sets.
* `dynamic` (NTK) stretches its base continuously. `generate` rotates a prompt by the frequencies of
  the prompt's length, and each further token by those of the length that it makes; keys stay as
  they are. That is a function of a token's position and of the prompt's length.

Shapes: N packed tokens, R rotary dimensions.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from motet_models.context import original_length, rope_settings, trained_context
from motet_shared.errors import ConfigError

KINDS = ("longrope", "dynamic")
_TOLERANCE = 1e-6


class Rotated(Protocol):
    """Hold the properties of a request that select its frequencies. rope_key: which frequencies its keys have."""

    num_prompt: int
    rope_key: int

    @property
    def tokens(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class RopeRule:
    """Select the frequencies of a sequence; original: the length up to which they do not change."""

    kind: Literal["longrope", "dynamic"]
    original: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> RopeRule | None:
        """Return the rule of a model; None if no sequence that it was trained for changes it.

        Raises ConfigError if its layers follow different rules.
        """
        settings = config.to_dict()
        rules = {
            cls(kind, original_length(settings, rope))
            for rope in rope_settings(settings)
            if (kind := rope.get("rope_type", rope.get("type"))) in KINDS
        }
        rules = {rule for rule in rules if rule.original < (trained_context(settings) or 0)}
        if len(rules) > 1:
            raise ConfigError(
                f"model_type={config.model_type!r} is not supported: its layers scale rotary"
                f" embeddings by different rules ({', '.join(sorted(map(str, rules)))})"
            )
        return next(iter(rules), None)

    def key(self, num_prompt: int, num_tokens: int) -> int:
        """Return which frequencies the keys of a sequence have, 0 for the original ones.

        Sequences share blocks of the prefix cache only under the same key.
        """
        if self.kind == "longrope":
            return int(num_tokens > self.original)
        return num_prompt if num_prompt > self.original else 0

    def lengths(self, request: Rotated, first: int, stop: int) -> np.ndarray:
        """Return for tokens `first` to `stop` the length whose frequencies they have."""
        own = np.arange(first + 1, stop + 1)
        if self.kind == "longrope":
            return np.full_like(own, self.original + 1) if request.rope_key else own
        return np.maximum(own, request.num_prompt)

    def drafts_end(self, request: Rotated) -> int | None:
        """Return the length that drafts may not exceed: behind it all keys would change."""
        return self.original if self.kind == "longrope" and not request.rope_key else None


class SequenceRope:
    """Replace the rotary embeddings of one model that follow a rule.

    lengths_N: for each token of the next forward pass the length whose frequencies it has, on the
        host; None: that of the longest sequence, as transformers does.
    """

    def __init__(self, model: PreTrainedModel, rule: RopeRule):
        self.rule = rule
        self.lengths_N: np.ndarray | None = None
        for module in model.modules():
            kind = getattr(module, "rope_type", None)
            if kind == rule.kind or (isinstance(kind, dict) and rule.kind in kind.values()):
                self._replace(module)

    def _replace(self, module: Any) -> None:
        forward: Any = module.forward
        replaced: Any = self._longrope
        if self.rule.kind == "dynamic":
            forward, replaced = inspect.unwrap(type(module).forward).__get__(module), self._dynamic
            _check_takes_frequencies(module, forward)
        module.forward = partial(self._forward, module, replaced, forward)

    def _forward(
        self,
        module: Any,
        replaced: Any,
        forward: Any,
        x: Tensor,
        position_ids: Tensor,
        *args: Any,
        **options: Any,
    ) -> Any:
        layer_type = options.get("layer_type", args[0] if args else None)
        kind = module.rope_type if layer_type is None else module.rope_type[layer_type]
        if kind != self.rule.kind:
            return forward(x, position_ids, *args, **options)
        lengths_N = self.lengths_N
        if lengths_N is None:
            longest = int(position_ids.max()) + 1
            lengths_N = np.full(position_ids.shape[-1], longest)
        forward = partial(forward, **({} if layer_type is None else {"layer_type": layer_type}))
        return replaced(module, forward, x, position_ids, lengths_N, layer_type)

    def _longrope(
        self,
        _module: Any,
        forward: Any,
        x: Tensor,
        positions: Tensor,
        lengths_N: np.ndarray,
        _: Any,
    ) -> Any:
        """Call the module once for each set of factors that the tokens need."""
        is_long = lengths_N > self.rule.original
        if not is_long.any():
            return forward(x, positions)
        # A position beyond the original length selects the long factors; its own row is dropped.
        beyond = positions.new_full((*positions.shape[:-1], 1), self.rule.original)
        long = _each(forward(x, torch.cat((positions, beyond), -1)), lambda t: t[:, :-1])
        if is_long.all():
            return long
        mask_N = torch.from_numpy(is_long).to(x.device)
        within = positions.clamp(max=self.rule.original - 1)
        return _each(
            long,
            lambda t, s: torch.where(mask_N.view(1, -1, *[1] * (t.dim() - 2)), t, s),
            forward(x, within),
        )

    def _dynamic(
        self,
        module: Any,
        forward: Any,
        x: Tensor,
        positions: Tensor,
        lengths_N: np.ndarray,
        layer_type: str | None,
    ) -> Any:
        """Call the module with frequencies of each token's own, `[N, R / 2]`."""
        name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        original = getattr(module, name.replace("inv_freq", "original_inv_freq"))
        table = original.to(x.device)
        if (lengths_N > self.rule.original).any():
            table = self._stretched(module.config, original, lengths_N, layer_type).to(x.device)
        kept = getattr(module, name)
        setattr(module, name, table)
        try:
            return forward(x, positions)
        finally:
            setattr(module, name, kept)

    def _stretched(
        self, config: Any, original_R: Tensor, lengths_N: np.ndarray, layer_type: str | None
    ) -> Tensor:
        """Return the frequencies of each token, `[N, R / 2]`, by transformers' formula."""
        rope = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
        dim, factor, whole = 2 * len(original_R), rope["factor"], config.max_position_embeddings
        lengths = torch.from_numpy(lengths_N)[:, None]
        base = rope["rope_theta"] * ((factor * lengths / whole) - (factor - 1)) ** (dim / (dim - 2))
        stretched = 1.0 / (base ** (torch.arange(0, dim, 2).float() / dim))
        return torch.where(lengths > self.rule.original, stretched, original_R.float().cpu())


def install(model: PreTrainedModel) -> SequenceRope | None:
    """Replace a model's rotary embeddings whose frequencies depend on lengths; None without any."""
    rule = RopeRule.of(model.config)
    return None if rule is None else SequenceRope(model, rule)


def _each(made: Any, function: Any, *others: Any) -> Any:
    """Apply a function to the one tensor, or to each of the two, that a module returns."""
    if isinstance(made, Tensor):
        return function(made, *others)
    return tuple(function(*parts) for parts in zip(made, *others, strict=True))


def _check_takes_frequencies(module: nn.Module, forward: Any) -> None:
    """Raise ConfigError unless a module computes the same with a row of frequencies per token."""
    name = type(module).__name__
    x, positions = torch.zeros(1, 3, 1), torch.tensor([[0, 5, 11]])
    kept: Any = getattr(module, "inv_freq", None)
    if kept is None:  # by type of layer: none of transformers' has `dynamic` there
        raise ConfigError(f"{name} is not supported with dynamic rotary embeddings")
    expected = forward(x, positions)
    module.inv_freq = kept.expand(3, -1)
    try:
        found = forward(x, positions)
    finally:
        module.inv_freq = kept
    pairs = (
        [(expected, found)] if isinstance(expected, Tensor) else zip(expected, found, strict=True)
    )
    if not all(torch.allclose(one, other, atol=_TOLERANCE) for one, other in pairs):
        raise ConfigError(f"{name} is not supported with dynamic rotary embeddings")
