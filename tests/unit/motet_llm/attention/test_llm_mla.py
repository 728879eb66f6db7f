"""Latent attention: exact on every family that has it, caches the latent alone, refuses what only looks like it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from motet_llm.attention import latent as mla
from motet_llm.attention import paged as attention
from motet_shared.errors import ConfigError
from support.checkpoints.tiny_mixers import LATENT, tiny_model, with_mixers
from support.engine.packed_steps import (
    TOLERANCE,
    PlainLayout,
    Sequence,
    check_against_generate,
    run_schedule,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.long(after=3)
@pytest.mark.parametrize("family", LATENT)
def test_logprobs_equal_generate_under_random_chunks(family: str) -> None:
    reference = tiny_model(family)
    ours = with_mixers(reference)
    for seed in range(2):
        check_against_generate(reference, ours, seed)


# In bfloat16 what the matrices take in is rounded too, and the reference's is not.
@pytest.mark.parametrize(("form", "tolerance"), [("float32", TOLERANCE), ("bfloat16", 0.01)])
def test_packed_matrices_give_the_same(form: str, tolerance: float) -> None:
    reference = tiny_model("deepseek_v3")
    for module in reference.modules():
        if hasattr(module, "kv_b_proj"):
            module.kv_b_proj.weight.copy_(module.kv_b_proj.weight.to(getattr(torch, form)))
    ours = with_mixers(reference)
    packed = [module for module in ours.modules() if isinstance(module, mla.LatentHeads)]
    for heads in packed:
        heads.pack(form)
        heads.pack(form)
    assert len(packed) == 3
    assert not [
        name for name, buffer in ours.named_buffers() if "kv_b_proj" in name and buffer.ndim == 3
    ]
    check_against_generate(reference, ours, 0, tolerance=tolerance)


def test_cache_holds_latent_and_rotated_key_of_each_token() -> None:
    config = LATENT["deepseek_v3"]
    row = Sequence(5, [1, 2, 3, 4, 5, 6, 7], 0)
    run_schedule(with_mixers(tiny_model("deepseek_v3")), [row], random.Random(0))
    width = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    assert {key: tuple(kept.shape) for key, kept in row.kept.items()} == {
        (layer, "latent"): (7, width) for layer in range(3)
    }


def test_absorbed_matrices_are_views_of_the_checkpoint() -> None:
    model = tiny_model("deepseek_v2")
    weights = [
        module.kv_b_proj.weight for module in model.modules() if hasattr(module, "kv_b_proj")
    ]
    assert mla.install(model) == len(weights) == 3
    for weight, module in zip(
        weights, (m for m in model.modules() if hasattr(m, "kv_b_proj")), strict=True
    ):
        heads = module.kv_b_proj
        storage = weight.untyped_storage().data_ptr()
        assert (
            heads.key_HRD.untyped_storage().data_ptr()
            == heads.value_HVR.untyped_storage().data_ptr()
            == storage
        )


def test_other_projections_stay_linear_under_their_names() -> None:
    before = {
        name
        for name, module in tiny_model("deepseek_v3").named_modules()
        if isinstance(module, nn.Linear)
    }
    after = {
        name
        for name, module in with_mixers(tiny_model("deepseek_v3")).named_modules()
        if isinstance(module, nn.Linear)
    }
    assert before - after == {f"model.layers.{layer}.self_attn.kv_b_proj" for layer in range(3)}
    assert after <= before


def test_sparse_attention_is_refused_by_name() -> None:
    model = tiny_model(
        "deepseek_v32", **LATENT["deepseek_v3"], index_topk=8, index_head_dim=16, index_n_heads=2
    )
    with pytest.raises(ConfigError, match="DeepseekV32Attention"):
        mla.install(model)


def test_biased_expansion_is_refused() -> None:
    model = tiny_model("deepseek_v3")
    old = model.model.layers[0].self_attn.kv_b_proj
    model.model.layers[0].self_attn.kv_b_proj = nn.Linear(old.in_features, old.out_features)
    with pytest.raises(ConfigError, match=r"DeepseekV3Attention .*kv_b_proj"):
        mla.install(model)


def test_expansion_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("deepseek_v3")
    kind = type(model.model.layers[0].self_attn)
    plain = kind.expand_kv

    def doubled(
        self: nn.Module, latent: torch.Tensor, rope: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = plain(self, latent, rope)
        return keys, values * 2

    monkeypatch.setattr(kind, "expand_kv", doubled)
    with pytest.raises(ConfigError, match=r"expand_kv .*kv_b_proj"):
        mla.install(model)


def test_expansion_under_another_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("deepseek_v3")
    monkeypatch.delattr(type(model.model.layers[0].self_attn), "expand_kv")
    with pytest.raises(ConfigError, match=r"DeepseekV3Attention .*expand_kv"):
        mla.install(model)


def test_window_and_mask_are_refused() -> None:
    module = with_mixers(tiny_model("deepseek_v3")).model.layers[0].self_attn
    query, key = torch.zeros(1, 4, 2, 24), torch.zeros(1, 1, 2, 32)
    layout = PlainLayout([], {}, 0)
    with pytest.raises(ConfigError, match="sliding_window"):
        mla.latent_attention(
            module, query, key, key[..., :24], None, layout=layout, scaling=1.0, sliding_window=4
        )
    with pytest.raises(ConfigError):
        mla.latent_attention(
            module, query, key, key[..., :24], torch.zeros(2, 2), layout=layout, scaling=1.0
        )


def test_model_without_latent_attention_is_left_alone() -> None:
    model = tiny_model("lfm2")
    assert mla.install(model) == 0
    assert model.config._attn_implementation != attention.NAME
