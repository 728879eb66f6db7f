"""Add image prompts to attention, row by row: each picture of a pass has its own, or none.

One class for each form of attention that diffusers has IP-Adapters for; each replaces a processor,
and computes what diffusers' own processor with an adapter does, for the rows of its pictures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from motet_diffusion.engine.model_call import PromptTokens

Rows = list[int]


class PassPrompts:
    """Hold the image prompts of the current pass, each with its rows."""

    def __init__(self) -> None:
        self.active: list[tuple[Rows, PromptTokens]] = []

    def set(self, pictures: Sequence[tuple[Sequence[PromptTokens], int]]) -> None:
        """Set the image prompts of each picture of the pass, and its number of rows."""
        self.active, start = [], 0
        for prompts, rows in pictures:
            self.active += [(list(range(start, start + rows)), prompt) for prompt in prompts]
            start += rows

    @contextmanager
    def of_rows(self, rows: Sequence[int]) -> Iterator[None]:
        """Leave out all other rows of the pass while in the block, for layers that get these only."""
        whole = self.active
        places = {row: place for place, row in enumerate(rows)}
        self.active = []
        for own, prompt in whole:
            kept = [number for number, row in enumerate(own) if row in places]
            if kept:
                time = None if prompt.time is None else prompt.time[kept]
                left = prompt._replace(tokens=prompt.tokens[kept], time=time)
                self.active.append(([places[own[number]] for number in kept], left))
        try:
            yield
        finally:
            self.active = whole


class _Prompted:
    """Hold the processor that is replaced, the layers by adapter, and the prompts of the pass."""

    def __init__(self, base: Any, layers: Mapping[str, Any], current: PassPrompts):
        self._base, self._layers, self._current = base, layers, current


class PromptedAttention(_Prompted):
    """Replace the processor of a UNet's attention to text. layers: (keys, values) by adapter."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        """Return the attention's output, as diffusers' IPAdapterAttnProcessor2_0 computes it."""
        if not self._current.active or encoder_hidden_states is None:
            out: Tensor = self._base(
                attn, hidden_states, encoder_hidden_states, attention_mask, temb
            )
            return out
        if attention_mask is not None:
            count, length, _ = encoder_hidden_states.shape
            attention_mask = attn.prepare_attention_mask(attention_mask, length, count)
            attention_mask = attention_mask.view(count, attn.heads, -1, attention_mask.shape[-1])
        query = _heads(attn, attn.to_q(hidden_states))
        key, value = attn.to_k(encoder_hidden_states), attn.to_v(encoder_hidden_states)
        mixed = _joined(
            scaled_dot_product_attention(
                query, _heads(attn, key), _heads(attn, value), attn_mask=attention_mask
            )
        )
        _add_prompts(mixed, attn, query, self._layers, self._current)
        result: Tensor = attn.to_out[1](attn.to_out[0](mixed))
        result = result / attn.rescale_output_factor
        return result


class PromptedFluxAttention(_Prompted):
    """Replace the processor of Flux' attention of pictures and text. layers: as above."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        """Return the attention's outputs, and what its block adds to the picture at its end."""
        outputs = self._base(
            attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
        )
        if not self._current.active:
            return outputs
        query = attn.norm_q(attn.to_q(hidden_states).unflatten(-1, (attn.heads, -1)))
        added = torch.zeros_like(outputs[0])
        _add_prompts(added, attn, query.transpose(1, 2), self._layers, self._current)
        return (*outputs, added)


class PromptedJointAttention(_Prompted):
    """Replace the processor of SD3's attention. layers: by adapter, its processor in diffusers."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Any:
        """Return the attention's outputs, as diffusers' SD3IPAdapterJointAttnProcessor2_0 does."""
        if not self._current.active:
            return self._base(attn, hidden_states, encoder_hidden_states, attention_mask)
        parts = (attn.to_q, attn.to_k, attn.to_v)
        own = [_heads(attn, part(hidden_states)) for part in parts]
        query, key, value = _normed(own, attn.norm_q, attn.norm_k)
        if encoder_hidden_states is not None:
            parts = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            text = [_heads(attn, part(encoder_hidden_states)) for part in parts]
            text = _normed(text, attn.norm_added_q, attn.norm_added_k)
            query, key, value = (
                torch.cat(pair, 2) for pair in zip((query, key, value), text, strict=True)
            )
        mixed = _joined(scaled_dot_product_attention(query, key, value))
        picture, words = mixed.tensor_split((hidden_states.shape[1],), 1)
        picture = picture.clone()
        for rows, prompt in self._current.active:
            layer = self._layers[prompt.name]
            picture[rows] += prompt.scale * _of_joint(
                attn, layer, [part[rows] for part in own], prompt
            )
        picture = attn.to_out[1](attn.to_out[0](picture))
        if encoder_hidden_states is None:
            return picture
        return picture, words if attn.context_pre_only else attn.to_add_out(words)


def _of_joint(attn: Any, layer: Any, own: Sequence[Tensor], prompt: PromptTokens) -> Tensor:
    """Return the attention of a picture to itself and an image; own: queries, keys, values."""
    tokens = layer.norm_ip(prompt.tokens, temb=prompt.time)
    key = torch.cat([layer.norm_k(own[1]), layer.norm_ip_k(_heads(attn, layer.to_k_ip(tokens)))], 2)
    value = torch.cat([own[2], _heads(attn, layer.to_v_ip(tokens))], 2)
    return _joined(scaled_dot_product_attention(layer.norm_q(own[0]), key, value))


def _add_prompts(
    mixed: Tensor, attn: Any, query: Tensor, layers: Mapping[str, Any], current: PassPrompts
) -> None:
    """Add the attention to the image prompts in place. query: `[rows, heads, tokens, channels]`."""
    for rows, prompt in current.active:
        to_key, to_value = layers[prompt.name]
        added = scaled_dot_product_attention(
            query[rows],
            _heads(attn, to_key(prompt.tokens)),
            _heads(attn, to_value(prompt.tokens)),
        )
        mixed[rows] += prompt.scale * _joined(added)


def _normed(
    parts: Sequence[Tensor], query: nn.Module | None, key: nn.Module | None
) -> list[Tensor]:
    """Return queries, keys and values, the first two normalized where the attention does that."""
    norms = (query, key, None)
    return [part if norm is None else norm(part) for part, norm in zip(parts, norms, strict=True)]


def _heads(attn: Any, x: Tensor) -> Tensor:
    """Return `[rows, tokens, channels]` as `[rows, heads, tokens, channels of a head]`."""
    heads: Tensor = x.unflatten(2, (attn.heads, -1)).transpose(1, 2)
    return heads


def _joined(heads: Tensor) -> Tensor:
    """Return `[rows, heads, tokens, channels of a head]` as `[rows, tokens, channels]`."""
    return heads.transpose(1, 2).flatten(2)
