"""Count a model's parameters and its layers' caches from the fields of its config.json.

The counts follow transformers' model code; the tests compare them with `num_parameters` of the
models that it builds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from motet_shared.errors import ConfigError

from .context import trained_context
from .model_families import Family, Flag
from .model_shape import LayerCache, ModelShape, Parameters

PARTS = tuple(name for name in Parameters.__dataclass_fields__ if name != "tied")


class ConfigFields:
    """Read fields of a config.json by alternative names, with the family's defaults."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, object]):
        self.values = {**defaults, **config}
        self.kind = str(config["model_type"])

    def get(self, *names: str) -> Any:
        """Return the first value that is present under one of `names`, else None."""
        return next(
            (self.values[name] for name in names if self.values.get(name) is not None), None
        )

    def number(self, *names: str, default: int | None = None) -> int:
        """Return a non-negative integer field, or `default`; raise ConfigError for other values."""
        value = self.get(*names)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(
                f"config.json: {names[0]}={value!r} of model_type={self.kind!r}: give a non-negative integer"
            )
        return value

    def flag(self, flag: Flag) -> bool:
        """Return a flag, read from the config if it is the name of a field."""
        return bool(self.get(flag)) if isinstance(flag, str) else flag


class ParameterCounter:
    """Count the parameters of one model, part by part."""

    def __init__(self, fields: ConfigFields, family: Family):
        self.fields = fields
        self.family = family
        self.hidden = fields.number("hidden_size", "n_embd")
        self.num_layers = fields.number("num_hidden_layers", "n_layer")
        self.vocab = fields.number("vocab_size")
        self.heads = fields.number("num_attention_heads", "n_head")
        self.kv_heads = fields.number("num_key_value_heads", default=self.heads)
        if not self.heads or not self.kv_heads or not self.num_layers:
            raise ConfigError(f"config.json of model_type={fields.kind!r}: no layers or no heads")
        self.head_dim = fields.number("head_dim", default=self.hidden // self.heads)
        self.tied = fields.flag("tie_word_embeddings")
        self.inner = self._inner()
        self.experts = self._experts()
        self.counts = dict.fromkeys(PARTS, 0)

    def _inner(self) -> int:
        """Return the width of a dense MLP, with LFM2's own rounding."""
        inner = self.fields.number(
            "intermediate_size",
            "n_inner",
            "block_ff_dim",
            "moe_intermediate_size",
            default=4 * self.hidden,
        )
        if self.family.mixer == "conv" and self.fields.get("block_auto_adjust_ff_dim"):
            multiple = self.fields.number("block_multiple_of")
            inner = int(
                float(self.fields.get("block_ffn_dim_multiplier") or 1) * int(2 * inner / 3)
            )
            inner = -(-inner // multiple) * multiple
        return inner

    def _experts(self) -> int:
        names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        return self.fields.number(*names, default=0) if self.family.expert_width else 0

    # ------------------------------------------------------------------------------------- counting
    def matrix(
        self, part: str, rows: int, columns: int, bias: bool = False, copies: int = 1
    ) -> None:
        """Count `copies` matrices of [rows, columns] under `part`."""
        self.counts[part] += copies * (rows * columns + rows * bias)
        self.counts["matrices"] += copies * rows * columns
        self.counts["matrix_rows"] += copies * rows

    def shape(self) -> ModelShape:
        """Count all parts and return the model's shape."""
        self._embeddings()
        layers = tuple(self._layer(index) for index in range(self.num_layers))
        counts = Parameters(**self.counts, tied=self.tied)
        return ModelShape(
            model_type=self.fields.kind,
            layers=layers,
            parameters=counts,
            hidden=self.hidden,
            vocab=self.vocab,
            widest=max(
                2 * self.inner,
                2 * self._active * self._expert_inner,
                (self.heads + 2 * self.kv_heads) * self.head_dim,
            ),
            expert_share=self._active / self.experts if self.experts else 1.0,
            context=trained_context(self.fields.values) or 0,
        )

    def _embeddings(self) -> None:
        family, table = self.family, self.vocab * self.hidden
        self.counts["embeddings"] = table
        if self.fields.kind == "gpt2":  # learned positions
            self.counts["embeddings"] += (
                self.fields.number("n_positions", default=1024) * self.hidden
            )
        if self.tied:
            self.counts["matrices"] += table
            self.counts["matrix_rows"] += self.vocab
        else:
            self.matrix("lm_head", self.vocab, self.hidden)
        self.counts["lm_head"] += self.vocab * self.fields.flag(family.head_bias)
        self.counts["norms"] += self.hidden * family.norm_parts

    def _layer(self, index: int) -> LayerCache:
        """Count one layer and return its cache."""
        family, kind = self.family, self._kind(index)
        norms = family.norms - 2 * (self.fields.get("use_post_norm") is False)
        self.counts["norms"] += norms * self.hidden * family.norm_parts + family.layer_extra
        self._feed_forward(index)
        state = 0
        if family.parallel or kind == "recurrent":
            state = {"mamba2": self._mamba2, "conv": self._conv, "delta": self._delta}[
                family.mixer
            ]()
            if not family.parallel:
                return LayerCache(state=state)
        window = self.fields.number("sliding_window") if kind == "window" else None
        chunk = self.fields.number("attention_chunk_size") if kind == "chunk" else None
        cache = (
            self._latent_attention(window)
            if family.attention == "latent"
            else self._attention(window)
        )
        return replace(cache, state=state, chunk=chunk)

    def _kind(self, index: int) -> str:
        """Return the kind of a layer: "full", "window", "chunk" or "recurrent"."""
        types = self.fields.get("layer_types", "layers_block_type")
        if isinstance(types, list) and len(types) > index:
            kind = str(types[index])
            if kind in ("linear_attention", "mamba", "mamba2", "conv"):
                return self._recurrent(kind)
            if kind == "chunked_attention":
                return "chunk"
            return (
                "window"
                if kind == "sliding_attention" and self.fields.get("sliding_window")
                else "full"
            )
        if self.family.mixer and not self.family.parallel:
            return self._recurrent("layer_types") if self._is_mixer(index) else "full"
        return "window" if self._slides(index) else "full"

    def _recurrent(self, kind: str) -> str:
        if not self.family.mixer:
            raise ConfigError(
                f"config.json: layers of kind {kind!r} are not known of {self.fields.kind!r}"
            )
        return "recurrent"

    def _is_mixer(self, index: int) -> bool:
        """Return True if a layer of a hybrid model is recurrent.

        The config lists its attention layers, or the interval at which they occur.
        """
        interval = self.fields.get("full_attention_interval")
        if interval:
            return bool((index + 1) % int(interval))
        return index not in (self.fields.get("attn_layer_indices", "full_attn_idxs") or ())

    def _slides(self, index: int) -> bool:
        """Return True if a layer has a sliding window, by the family's rule."""
        fields, rule = self.fields, self.family.windows
        if not fields.get("sliding_window") or fields.get("use_sliding_window") is False:
            return False
        if rule == "late":
            return bool(fields.get("use_sliding_window")) and index >= fields.number(
                "max_window_layers"
            )
        period = fields.number("sliding_window_pattern", "global_attn_every_n_layers", default=4)
        return {
            "all": True,
            "none": False,
            "alternate": index % 2 == 0,
            "pattern": (index + 1) % max(1, period) != 0,
        }[rule]

    # ------------------------------------------------------------------------------------ attention
    def _attention(self, window: int | None) -> LayerCache:
        family, fields = self.family, self.fields
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        bias = fields.flag(family.qkv_bias)
        self.matrix(
            "attention", queries * (2 if family.gate == "queries" else 1), self.hidden, bias
        )
        self.matrix("attention", keys, self.hidden, bias, copies=2)
        self.matrix("attention", self.hidden, queries, fields.flag(family.out_bias))
        if family.gate == "own":
            self.matrix("attention", queries, self.hidden)
        if family.qk_norm and fields.flag(family.qk_norm_if):
            self.counts["norms"] += (
                2 * self.head_dim if family.qk_norm == "head" else queries + keys
            )
        self.counts["attention"] += self.heads * family.sinks
        self.counts["norms"] += (self.hidden + self.inner) * family.sub_norms
        return LayerCache(
            elements=2 * keys, rows=2 * self.kv_heads, window=window, score_width=2 * queries
        )

    def _latent_attention(self, window: int | None) -> LayerCache:
        fields = self.fields
        latent, rope = fields.number("kv_lora_rank"), fields.number("qk_rope_head_dim")
        nope, value = fields.number("qk_nope_head_dim"), fields.number("v_head_dim")
        bias, low_rank = fields.flag(self.family.qkv_bias), fields.number("q_lora_rank", default=0)
        queries = self.heads * (nope + rope)
        if low_rank:
            self.matrix("attention", low_rank, self.hidden, bias)
            self.matrix("attention", queries, low_rank)
            self.counts["norms"] += low_rank
        else:
            self.matrix("attention", queries, self.hidden)
        self.matrix("attention", latent + rope, self.hidden, bias)
        self.matrix("attention", self.heads * (nope + value), latent)
        self.matrix("attention", self.hidden, self.heads * value, bias)
        self.counts["norms"] += latent
        width = self.heads * (2 * latent + rope)
        return LayerCache(elements=latent + rope, rows=1, window=window, score_width=width)

    # ----------------------------------------------------------------------------- recurrent mixers
    def _mamba2(self) -> int:
        """Count a Mamba-2 mixer (arXiv:2405.21060); return its state size."""
        fields = self.fields
        heads, groups = fields.number("mamba_n_heads"), fields.number("mamba_n_groups", default=1)
        state, kernel = fields.number("mamba_d_state"), fields.number("mamba_d_conv")
        inner = fields.number("mamba_d_ssm", default=fields.number("mamba_expand") * self.hidden)
        channels = inner + 2 * groups * state
        bias = fields.flag("mamba_proj_bias")
        self.matrix("recurrent", inner + channels + heads, self.hidden, bias)
        self.matrix(
            "recurrent",
            self.hidden,
            inner,
            fields.flag("projectors_bias") if self.family.parallel else bias,
        )
        self.counts["recurrent"] += channels * (kernel + fields.flag("mamba_conv_bias")) + 3 * heads
        if not self.family.parallel or fields.flag("mamba_rms_norm"):
            self.counts["norms"] += inner
        return channels * (kernel - 1) + inner * state

    def _conv(self) -> int:
        """Count LFM2's gated short convolution; return its state size."""
        bias, kernel = self.fields.flag("conv_bias"), self.fields.number("conv_L_cache")
        self.matrix("recurrent", 3 * self.hidden, self.hidden, bias)
        self.matrix("recurrent", self.hidden, self.hidden, bias)
        self.counts["recurrent"] += self.hidden * (kernel + bias)
        return self.hidden * (kernel - 1)

    def _delta(self) -> int:
        """Count a gated delta net (arXiv:2412.06464), as in Qwen3-Next; return its state size."""
        number = self.fields.number
        key_dim, value_dim = number("linear_key_head_dim"), number("linear_value_head_dim")
        value_heads, kernel = number("linear_num_value_heads"), number("linear_conv_kernel_dim")
        keys, values = number("linear_num_key_heads") * key_dim, value_heads * value_dim
        self.matrix("recurrent", 2 * keys + 2 * values, self.hidden)
        self.matrix("recurrent", 2 * value_heads, self.hidden)
        self.matrix("recurrent", self.hidden, values)
        self.counts["recurrent"] += (2 * keys + values) * kernel + 2 * value_heads
        self.counts["norms"] += value_dim
        return (2 * keys + values) * (kernel - 1) + value_heads * key_dim * value_dim

    # --------------------------------------------------------------------------------- feed-forward
    @property
    def _expert_inner(self) -> int:
        return (
            self.fields.number(self.family.expert_width, default=self.inner) if self.experts else 0
        )

    @property
    def _active(self) -> int:
        """Return the experts per token; all experts if the config does not say."""
        return (
            self.fields.number("num_experts_per_tok", "moe_k", default=self.experts)
            if self.experts
            else 0
        )

    def _mlp(self, part: str, inner: int, bias: bool, copies: int = 1) -> None:
        self.matrix(part, inner * (2 if self.family.gated else 1), self.hidden, bias, copies)
        self.matrix(part, self.hidden, inner, bias, copies)

    def _feed_forward(self, index: int) -> None:
        fields, family = self.fields, self.family
        bias = fields.flag(family.mlp_bias)
        shared = fields.number("shared_intermediate_size", default=0)
        if shared:
            self._mlp("mlp", shared, bias)
        if not self._is_sparse(index):
            if not (shared and not self.experts):
                self._mlp("mlp", self.inner, bias)
            return
        before = self.counts["experts"]
        self._mlp("experts", self._expert_inner, family.expert_bias, copies=self.experts)
        self.counts["active_experts"] += (
            (self.counts["experts"] - before) * self._active // self.experts
        )
        self.matrix("mlp", self.experts, self.hidden, family.router_bias)
        self.counts["mlp"] += self.experts * fields.flag(family.balance_bias)
        count = fields.number(
            "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", default=0
        )
        if count:
            self._mlp("mlp", count * self._expert_inner, bias)
        if fields.get("shared_expert_intermediate_size"):
            self._mlp("mlp", fields.number("shared_expert_intermediate_size"), bias)
            self.matrix("mlp", 1, self.hidden)

    def _is_sparse(self, index: int) -> bool:
        """Return True if a layer has experts."""
        fields = self.fields
        if not self.experts:
            return False
        types = fields.get("mlp_layer_types")
        if isinstance(types, list) and len(types) > index:
            return bool(types[index] == "sparse")
        start = fields.number(self.family.dense_layers or "moe_layer_start_index", default=0)
        end = fields.get("moe_layer_end_index")
        step = fields.number("decoder_sparse_step", "moe_layer_interval", default=1)
        inside = index >= start and (end is None or end < 0 or index <= end)
        return (
            inside
            and (index + 1) % max(1, step) == 0
            and index not in (fields.get("mlp_only_layers") or ())
        )
