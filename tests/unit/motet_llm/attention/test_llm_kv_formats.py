"""Engines whose KV cache is of 8 bits: near the exact one, in company, and with caches, tiers and transfers."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from motet_kernels.attention.kv_format import decode
from motet_kernels.runtime.device import dtype_name
from motet_llm.cache.kv_cache import KvCache, LayerShape
from motet_llm.config import EngineConfig
from motet_llm.disaggregation.kv_transfer import DTYPES, KvPart, pack, part_bytes, unpack
from motet_llm.engine.engine import Engine
from motet_llm.weights import checkpoint
from motet_shared.errors import ConfigError
from motet_shared.messages import Sampling
from support.checkpoints.language_checkpoints import tiny_checkpoint

CODES = ("int8", "float8_e4m3fn")
PROMPT = [(7 * i) % 250 for i in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("kv") / "llama")


def engine_of(folder: Path, **settings: Any) -> Engine:
    defaults = {
        "threads": 1,
        "num_blocks": 32,
        "max_running": 8,
        "token_budget": 64,
        "decode_slowdown": 0.0,
    }
    return Engine(EngineConfig(model=str(folder), **{**defaults, **settings}))


def answer(engine: Engine, key: str = "a", company: int = 0) -> tuple[list[int], list[float]]:
    for i in range(company):
        engine.add(
            f"{key} {i}",
            PROMPT[: 1 + 3 * i],
            Sampling(max_tokens=4 + i, temperature=0, ignore_eos=True),
        )
    engine.add(key, PROMPT, Sampling(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0))
    ids: list[int] = []
    logprobs: list[float] = []
    while engine.has_work:
        for output in engine.step():
            if output.key == key:
                ids += output.ids
                logprobs += [entry.logprob for entry in output.logprobs or []]
    return ids, logprobs


@pytest.mark.parametrize("code", CODES)
def test_it_is_near_the_exact_cache_and_a_third_of_it(code: str, folder: Path) -> None:
    exact, coded = engine_of(folder, kv_dtype="float32"), engine_of(folder, kv_dtype=code)
    assert coded.runner.describe()["kv_dtype"] == code
    assert (
        coded.runner.kv.nbytes * 64 == exact.runner.kv.nbytes * 20
    )  # heads of 16 numbers: 64 bytes, or 16 and 4
    theirs, ours = answer(exact)[1][0], answer(coded)[1][0]
    assert theirs != ours
    assert abs(theirs - ours) < 0.5


@pytest.mark.parametrize("code", CODES)
def test_company_prefixes_and_tiers_change_no_token(code: str, folder: Path) -> None:
    alone = answer(engine_of(folder, kv_dtype=code, deterministic=True))
    engine = engine_of(folder, kv_dtype=code, deterministic=True, host_cache=1 << 20, num_blocks=12)
    assert answer(engine, "first", company=4) == alone
    assert (
        answer(engine, "again") == alone
    )  # its prompt is in the prefix cache, or in memory behind it
    engine.check_integrity()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_settings_name_it_as_they_name_weights(device: str, folder: Path) -> None:
    """torch's name is another one for the same; it is what workers tell each other."""
    for name, dtype in (
        ("float8", torch.float8_e4m3fn),
        ("float8_e4m3fn", torch.float8_e4m3fn),
        ("int8", torch.int8),
    ):
        config = EngineConfig(model=str(folder), kv_dtype=name)
        found = checkpoint.resolve_kv_dtype(
            LlamaConfig(), config.kv_dtype, torch.float32, torch.device(device)
        )
        assert found == dtype
        assert DTYPES[dtype_name(found)] == dtype
    assert EngineConfig(model=str(folder), weights="float8").weights == "float8"
    with pytest.raises(ConfigError) as raised:
        EngineConfig(model=str(folder), kv_dtype="fp8")
    assert raised.value.param == "kv_dtype"


def cache_of(dtype: str, block_size: int) -> KvCache:
    shapes = {0: LayerShape(2, 16, 16), 1: LayerShape(2, 16, 16), 2: LayerShape(1, 24, 0)}
    return KvCache(shapes, 8, block_size, DTYPES[dtype])


def filled(dtype: str) -> tuple[KvCache, list[array[int]]]:
    kv = cache_of(dtype, 4)
    random = torch.Generator().manual_seed(0)
    tables = [array("i", [5, 1, 3]) for _ in kv.groups]
    slots = torch.tensor([tables[0][n // 4] * 4 + n % 4 for n in range(10)])
    for layer, (heads, dim) in {0: (2, 16), 1: (2, 16), 2: (1, 24)}.items():
        key, value = (torch.randn(10, heads, dim, generator=random) for _ in range(2))
        kv.write(layer, key, None if layer == 2 else value, slots)
    return kv, tables


def numbers(kv: KvCache, table: array[int], layer: int) -> list[torch.Tensor]:
    """The ten tokens of a layer, in float32."""
    slots = torch.tensor(
        [table[n // kv.block_size] * kv.block_size + n % kv.block_size for n in range(10)]
    )
    found = []
    for cache in kv.layer(layer):
        rows = cache.view(torch.uint8) if kv.dtype.itemsize == 1 else cache
        rows = rows[slots // kv.block_size, :, slots % kv.block_size]
        found.append(decode(rows.view(kv.dtype)) if kv.dtype.itemsize == 1 else rows.float())
    return found


@pytest.mark.parametrize("sender", [*CODES, "float32"])
@pytest.mark.parametrize("receiver", [*CODES, "float32", "bfloat16"])
def test_caches_of_any_two_types_send_to_each_other(sender: str, receiver: str) -> None:
    source, tables = filled(sender)
    part = KvPart(0, 10, (0, 1, 2), 0, 10, True)
    content = pack(source, tables, part)
    target = cache_of(receiver, 8)
    assert content.nbytes == part_bytes(target, part, source.dtype)
    others = [array("i", [2, 6]) for _ in target.groups]
    unpack(target, others, part, content, source.dtype)
    for layer in range(3):
        for here, there in zip(
            numbers(source, tables[0], layer), numbers(target, others[0], layer), strict=True
        ):
            if receiver in (sender, "float32"):
                assert torch.equal(here, there)
            else:
                torch.testing.assert_close(here, there, rtol=0.08, atol=0.02)
