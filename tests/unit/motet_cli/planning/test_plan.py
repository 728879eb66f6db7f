"""Test the memory arithmetic against the engine's real use, and its invariants."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_cli.planning.engine_memory import CPU_OVERHEAD
from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_models.capacity import (
    KV_FORMATS,
    KvGroup,
    Settings,
    group_layers,
    kv_layout,
    layout_of,
    plan,
)
from motet_models.model_config import model_shape, read_config
from motet_models.roofline import GPUS, Processor, decode_bound, matrix_bytes_read, prefill_bound
from motet_models.weight_formats import WEIGHT_FORMATS, weight_bytes
from motet_shared.errors import ConfigError
from motet_shared.messages import Sampling
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.peers.public_models import KNOWN

SHAPES = {name: model_shape(facts[3]) for name, facts in KNOWN.items()}
windows = st.dictionaries(
    st.integers(0, 30), st.sampled_from([None, None, 4, 12]), min_size=1, max_size=12
)


# -------------------------------------------------------------------------------------------------------------- groups
@given(windows, st.integers(1, 8), st.integers(1, 200), st.integers(1, 32))
def test_each_layer_is_in_one_group_of_its_kind(
    windows: dict[int, int | None], block_size: int, tokens: int, step: int
) -> None:
    layout = kv_layout(windows, dict.fromkeys(windows, 10), block_size)
    smallest = min(list(windows.values()).count(w) for w in windows.values())
    assert sorted(layer for group in layout.groups for layer in group.layers) == sorted(windows)
    assert all(windows[layer] == group.window for group in layout.groups for layer in group.layers)
    assert all(len(group.layers) <= smallest for group in layout.groups)
    assert layout.block_bytes == smallest * 10 * block_size
    most = layout.blocks_for(tokens, step)
    assert layout.blocks_for(tokens + 1, step) >= most
    if None in windows.values():
        longest = layout.longest(most, step)
        assert longest >= tokens
        assert layout.blocks_for(longest, step) <= most < layout.blocks_for(longest + 1, step)


@given(
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(1, 30),
    st.lists(st.integers(1, 12), min_size=1, max_size=30),
)
def test_sliding_groups_never_exceed_their_plan(
    block_size: int, window: int, step: int, chunks: list[int]
) -> None:
    group, computed = KvGroup((0,), window), 0
    chunks = [min(chunk, step) for chunk in chunks]
    most = group.most_blocks(sum(chunks), step, block_size)
    for chunk in chunks:
        held = -(-(computed + chunk) // block_size) - group.gap(computed, block_size).stop
        assert held <= most
        computed += chunk


def test_gemma_3_groups_have_the_size_of_its_ten_global_layers() -> None:
    layout = layout_of(SHAPES["Gemma-3-27B"].layers, 16, KV_FORMATS["bfloat16"])
    assert [len(group.layers) for group in layout.groups] == [10, 10, 10, 10, 10, 10, 2]
    assert [group.window for group in layout.groups] == [None] + [1024] * 6
    assert layout.block_bytes == 10 * 16 * 4096 * 2
    # A long sequence costs its global layers, and the windows that the others keep.
    assert layout.blocks_for(131072, 512) == 8192 + 6 * (-(-(1023 + 512) // 16) + 1)


def test_models_without_attention_are_rejected() -> None:
    with pytest.raises(ConfigError) as caught:
        kv_layout({}, {}, 16)
    assert caught.value.param == "model"
    assert group_layers({}) == []


# ---------------------------------------------------------------------------------------------------------- the engine
@pytest.mark.parametrize(
    ("family", "kv_dtype"),
    [
        ("llama", "float32"),
        ("qwen3", "float32"),
        ("mistral", "float32"),
        ("llama", "int8"),
        ("mistral", "float8"),
    ],
)
def test_the_engine_uses_the_planned_memory(family: str, kv_dtype: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, tmp_path / family)
    shape = model_shape(read_config(folder))
    settings = Settings(
        weights=WEIGHT_FORMATS["float32"], kv=KV_FORMATS[kv_dtype], token_budget=64, max_running=8
    )
    memory_plan = plan(shape, settings, 8 << 20, 128)
    config = EngineConfig(
        model=str(folder),
        kv_dtype=kv_dtype,
        num_blocks=memory_plan.num_blocks,
        token_budget=64,
        max_running=8,
        threads=1,
    )
    engine = Engine(config)
    stats = engine.stats()
    assert stats["kv_bytes"] == pytest.approx(memory_plan.kv, rel=0.05)
    assert stats["blocks_total"] == memory_plan.num_blocks
    assert engine.context == memory_plan.longest


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_the_planned_number_of_sequences_runs(family: str, tmp_path: Path) -> None:
    """Give the engine the blocks planned for three sequences: three run without preemption."""
    folder, context = tiny_checkpoint(family, tmp_path / family), 96
    layout = layout_of(model_shape(read_config(folder)).layers, 4, KV_FORMATS["float32"])
    blocks = 3 * layout.blocks_for(context, 16)
    engine = Engine(
        EngineConfig(
            model=str(folder), num_blocks=blocks, token_budget=16, max_running=8, block_size=4, threads=1,
            prefix_cache=False,
        )
    )  # fmt: skip
    for key in range(3):
        engine.add(
            str(key),
            [key + 1] * (context - 8),
            Sampling(max_tokens=8, temperature=0.0, ignore_eos=True),
        )
    while engine.has_work:
        engine.step()
    assert engine.stats()["preemptions"] == 0


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("tied", [True, False])
def test_weights_take_the_planned_memory(weights: str, tied: bool, tmp_path: Path) -> None:
    folder = tiny_checkpoint(
        "qwen3", tmp_path / "m", hidden_size=256, intermediate_size=768, num_hidden_layers=4, vocab_size=2000,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=tied,
    )  # fmt: skip
    format = WEIGHT_FORMATS[weights]
    engine = Engine(EngineConfig(model=str(folder), num_blocks=16, weights=weights, threads=1))
    model = engine.runner.model
    held = {tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    engine.close()
    # Embeddings of their own are as wide as the checkpoint's, which is float32.
    exact = format if tied and weights == "bfloat16" else replace(format, table_bytes=4)
    assert sum(held.values()) == pytest.approx(
        weight_bytes(model_shape(read_config(folder)), exact), rel=0.05
    )


MEASURE = """
import sys

sys.modules["triton"] = None  # which transformers imports where it is, and machines without a GPU have not

from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_shared.messages import Sampling

engine = Engine(EngineConfig(model=sys.argv[1], num_blocks=int(sys.argv[2]), threads=1, weights="float32"))
for key in range(4):
    engine.add(str(key), [(key + i) % 1000 for i in range(1000)], Sampling(max_tokens=4, temperature=0.0))
while engine.has_work:
    engine.step()
for layer in range(8):  # pages are taken when they are first written
    engine.runner.kv.rows(layer).fill_(0)
print(engine.stats()["resident_bytes"])
"""


@pytest.mark.extended("soak")
@pytest.mark.slow
def test_a_process_takes_the_planned_memory(tmp_path: Path) -> None:
    folder = tiny_checkpoint(
        "qwen3", tmp_path / "m", hidden_size=768, intermediate_size=2304, num_hidden_layers=8, vocab_size=16000,
        num_attention_heads=12, num_key_value_heads=4, head_dim=64, max_position_embeddings=2048,
    )  # fmt: skip
    settings = Settings(
        weights=WEIGHT_FORMATS["float32"], kv=KV_FORMATS["float32"], overhead=CPU_OVERHEAD
    )
    memory_plan = plan(model_shape(read_config(folder)), settings, 1200 << 20, 1024)
    command = [sys.executable, "-c", MEASURE, str(folder), str(memory_plan.num_blocks)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert float(done.stdout) == pytest.approx(memory_plan.used, rel=0.05)


# ------------------------------------------------------------------------------------------------------------- weights
def test_weights_by_format() -> None:
    tied, untied = SHAPES["Qwen3-0.6B"], SHAPES["Qwen3-8B"]
    for shape in (tied, untied):
        assert weight_bytes(shape, WEIGHT_FORMATS["bfloat16"]) == pytest.approx(
            2 * shape.parameters.total, rel=0.001
        )
        assert weight_bytes(shape, WEIGHT_FORMATS["float32"]) == 4 * shape.parameters.total
    table = 151936 * 1024
    # Quantized, a tied lm_head is a copy beside the exact embeddings.
    quantized = weight_bytes(tied, WEIGHT_FORMATS["int8"])
    assert quantized == pytest.approx(tied.parameters.total + 2 * table, rel=0.01)


def test_too_little_memory_is_rejected() -> None:
    shape = SHAPES["Llama-3.1-8B"]
    with pytest.raises(ConfigError, match=r"16\.00 GiB.* 16\.\d+ GiB") as caught:
        plan(shape, Settings(), 16 << 30, 8192)
    assert caught.value.param == "memory"
    with pytest.raises(ConfigError, match=r"200000.* 131072") as caught:
        plan(shape, Settings(), 80 << 30, 200000)
    assert caught.value.param == "context"


@given(
    st.sampled_from(sorted(SHAPES)),
    st.integers(20, 1000),
    st.integers(1, 4000),
    st.integers(1, 300),
)
def test_plans_fit_and_waste_less_than_a_block(
    name: str, gib: int, context: int, running: int
) -> None:
    try:
        memory_plan = plan(SHAPES[name], Settings(max_running=running), gib << 30, context)
    except ConfigError:
        return
    assert memory_plan.used <= memory_plan.memory < memory_plan.used + memory_plan.block_bytes
    assert 1 <= memory_plan.running <= running
    assert memory_plan.sequences * memory_plan.per_sequence <= memory_plan.kv
    assert memory_plan.longest >= context


# ------------------------------------------------------------------------------------------------------------ roofline
def test_decoding_one_sequence_reads_each_weight_once() -> None:
    shape, gpu, bf16 = SHAPES["Llama-3.1-8B"], GPUS["H100"], WEIGHT_FORMATS["bfloat16"]
    bound = decode_bound(shape, gpu, bf16, batch=1, context=1, kv=KV_FORMATS["bfloat16"])
    matrices = shape.parameters.total - shape.parameters.embeddings
    assert bound.limit == "bandwidth"
    assert bound.tokens_per_second == pytest.approx(3350e9 / (2 * matrices), rel=0.001)


def test_large_batches_and_prefill_are_compute_bound() -> None:
    shape, bf16 = SHAPES["Qwen3-8B"], WEIGHT_FORMATS["bfloat16"]
    batch = decode_bound(
        shape, GPUS["H100"], bf16, batch=4096, context=16, kv=KV_FORMATS["bfloat16"]
    )
    prefill = prefill_bound(shape, GPUS["H100"], bf16, tokens=8192)
    assert batch.limit == prefill.limit == "compute"
    assert prefill.tokens_per_second < 989e12 / (2 * (shape.parameters.total - 2 * 151936 * 4096))
    assert (
        prefill_bound(shape, GPUS["H100"], bf16, tokens=512).tokens_per_second
        > prefill.tokens_per_second
    )


def test_experts_are_read_if_tokens_are_routed_to_them() -> None:
    shape, bf16 = SHAPES["Qwen3-30B-A3B"], WEIGHT_FORMATS["bfloat16"]
    one, many = (matrix_bytes_read(shape, bf16, tokens) for tokens in (1, 10_000))
    counts = shape.parameters
    assert one == pytest.approx(2 * (counts.active - counts.embeddings), rel=0.01)
    assert many == pytest.approx(2 * (counts.total - counts.embeddings), rel=0.01)


def test_windows_and_latents_make_long_contexts_cheap() -> None:
    slow = Processor(name="x", memory=1, bandwidth=1e9, bf16=1e15, int8=1e15)
    bf16 = WEIGHT_FORMATS["bfloat16"]

    def seconds(name: str, context: int) -> float:
        return (
            1
            / decode_bound(
                SHAPES[name], slow, bf16, batch=1, context=context, kv=KV_FORMATS["bfloat16"]
            ).tokens_per_second
        )

    assert (seconds("Gemma-3-27B", 65536) - seconds("Gemma-3-27B", 32768)) == pytest.approx(
        32768 * 10 * 4096 * 2 / 1e9
    )
    assert (seconds("DeepSeek-V3", 65536) - seconds("DeepSeek-V3", 32768)) == pytest.approx(
        32768 * 70272 / 1e9
    )
