"""Adapters that come and go in a worker's folder while it serves."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import torch
from transformers import AutoModelForCausalLM

from motet_kernels.linear.lora import LoraFactors
from motet_llm.config import DecodeConfig
from motet_llm.service import Decode
from motet_shared.errors import BadRequest, UnknownModel
from motet_shared.messages import Generate, Sampling, Tokens
from motet_shared.testing import memory_buses, running
from motet_shared.wire.bus import Bus
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.checkpoints.lora_folders import make_adapter, with_adapter

PROMPT = [(7 * i * i + i) % 250 for i in range(40)]
COUNT = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runtime") / "tiny"
    return tiny_checkpoint("llama", path, hidden_size=32, head_dim=8)


def write(folder: Path, path: Path, rank: int, targets: list[str], seed: int) -> Path:
    """Write an adapter of a rank for some matrices."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return make_adapter(model, path, seed=seed, r=rank, target_modules=targets)


@torch.inference_mode()
def due(folder: Path, adapter: Path | None) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if adapter is not None:
        model = with_adapter(model, adapter)
    tokens = list(PROMPT)
    for _ in range(COUNT):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  # other threads change what is waited for
            await asyncio.sleep(0.02)


async def tokens(bus: Bus, model: str, count: int = COUNT) -> list[int]:
    sampling = Sampling(max_tokens=count, temperature=0.0, ignore_eos=True)
    found: list[int] = []
    async with bus.open(
        "decode", Generate(model=model, prompt=PROMPT, sampling=sampling)
    ) as stream:
        async for body in stream:
            assert isinstance(body, Tokens)
            found += body.ids
    return found


def config(folder: Path, served: Path, **more: Any) -> DecodeConfig:
    return DecodeConfig(
        model=str(folder), adapter_folder=str(served), num_blocks=128, threads=1, metrics_port=-1,
        max_running=8, **more,
    )  # fmt: skip


def names(bus: Bus) -> set[str]:
    beats = bus.directory.ready("decode")
    return {card.name for beat in beats for card in beat.models if not card.problem}


def two_versions(folder: Path, tmp_path: Path) -> tuple[Path, Path, Path]:
    """Return a served folder with the first version of `polite`, and the folders of both."""
    served = tmp_path / "served"
    first = write(folder, tmp_path / "first", 4, ["q_proj"], 1)
    second = write(folder, tmp_path / "second", 4, ["q_proj"], 2)
    shutil.copytree(first, served / "polite")
    return served, first, second


async def replace_polite(decode: Decode, served: Path, version: Path) -> None:
    """Put another version in place of `polite`, and wait until it is served."""
    root = next(card for card in decode.models() if card.name == "polite").hash_root
    shutil.copytree(version, served / "polite", copy_function=shutil.copy, dirs_exist_ok=True)
    await eventually(
        lambda: any(c.name == "polite" and c.hash_root != root for c in decode.models())
    )


async def test_adapters_come_grow_and_go_while_requests_run(folder: Path, tmp_path: Path) -> None:
    """The second one has a higher rank, other matrices, and needs a second slot."""
    served = tmp_path / "served"
    served.mkdir()
    small = write(folder, tmp_path / "small", 2, ["q_proj", "v_proj"], 1)
    large = write(folder, tmp_path / "large", 8, ["q_proj", "down_proj"], 2)
    expected = {
        "tiny": due(folder, None),
        "small": due(folder, small),
        "a/large": due(folder, large),
    }
    assert len(set(map(tuple, expected.values()))) == 3
    async with (
        memory_buses("tokenizer", "decode") as (bus, other),
        running(Decode(config(folder, served), other)) as decode,
    ):
        assert await tokens(bus, "tiny") == expected["tiny"]
        (served / "small").symlink_to(small)
        await eventually(lambda: "small" in names(bus))
        assert await tokens(bus, "small") == expected["small"]
        (served / quote("a/large", safe="")).symlink_to(large)
        await eventually(lambda: "a/large" in names(bus))
        for name in ("a/large", "small", "tiny", "a/large"):
            assert await tokens(bus, name) == expected[name]
        (served / "small").unlink()
        await eventually(lambda: "small" not in names(bus))
        with pytest.raises(UnknownModel):
            await tokens(bus, "small")
        assert await tokens(bus, "a/large") == expected["a/large"]
        await eventually(lambda: not decode.stats()["running"])
        decode.check_integrity()


async def test_others_are_loaded_where_one_with_more_matrices_has_left(
    folder: Path, tmp_path: Path
) -> None:
    served = tmp_path / "served"
    served.mkdir()
    everywhere = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    write(folder, served / "whole", 2, everywhere, 1)
    two = {
        name: write(folder, tmp_path / name, 2, ["q_proj"], 2 + n) for n, name in enumerate("bc")
    }
    async with (
        memory_buses("tokenizer", "decode") as (bus, other),
        running(Decode(config(folder, served), other)) as decode,
    ):
        await tokens(bus, "whole")
        shutil.rmtree(served / "whole")
        await eventually(lambda: "whole" not in names(bus))
        for name, path in two.items():
            (served / name).symlink_to(path)
        await eventually(lambda: two.keys() <= names(bus))
        for name, path in two.items():
            assert await tokens(bus, name) == due(folder, path)
        decode.check_integrity()


async def test_a_long_reply_keeps_its_adapter_and_holds_up_no_change(
    folder: Path, tmp_path: Path
) -> None:
    served, first, second = two_versions(folder, tmp_path)
    shutil.copytree(second, served / "other")
    sampling = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)
    request = Generate(model="polite", prompt=PROMPT, sampling=sampling)
    async with (
        memory_buses("tokenizer", "decode") as (bus, other),
        running(Decode(config(folder, served), other)) as decode,
    ):
        found: list[int] = []
        async with bus.open("decode", request, window=2) as stream:
            async for body in stream:
                assert isinstance(body, Tokens)
                if not found:
                    shutil.copytree(first, served / "third")
                    await replace_polite(decode, served, second)
                    await eventually(lambda: "third" in names(bus))
                    assert await tokens(bus, "polite") == due(folder, second)
                    assert await tokens(bus, "third") == due(folder, first)
                found += body.ids
        assert found[:COUNT] == due(folder, first)
        assert len(found) == 40
        await eventually(lambda: not decode.stats()["running"])
        decode.check_integrity()


async def test_an_adapter_without_memory_ends_no_worker(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = tmp_path / "served"
    served.mkdir()
    adapter = write(folder, tmp_path / "large", 4, ["q_proj"], 1)

    def no_memory(*_: object) -> None:
        raise RuntimeError("out of memory")

    async with (
        memory_buses("tokenizer", "decode") as (bus, other),
        running(Decode(config(folder, served), other)) as decode,
    ):
        monkeypatch.setattr("motet_llm.adapters.bank.LoraFactors", no_memory)
        (served / "large").symlink_to(adapter)
        await eventually(lambda: any(card.problem for card in decode.models()))
        assert await tokens(bus, "tiny") == due(folder, None)
        with pytest.raises(BadRequest):
            await tokens(bus, "large")
        decode.check_integrity()


async def test_an_adapter_is_replaced_and_its_blocks_are_not_reused(
    folder: Path, tmp_path: Path
) -> None:
    served, first, second = two_versions(folder, tmp_path)
    async with (
        memory_buses("tokenizer", "decode") as (bus, other),
        running(Decode(config(folder, served, max_adapters=1), other)) as decode,
    ):
        assert await tokens(bus, "polite") == due(folder, first)
        await replace_polite(decode, served, second)
        assert await tokens(bus, "polite") == due(folder, second)
        decode.check_integrity()


async def test_one_that_cannot_be_served_says_why(folder: Path, tmp_path: Path) -> None:
    served = tmp_path / "served"
    served.mkdir()
    big = write(folder, tmp_path / "big", 16, ["q_proj"], 1)
    async with (
        memory_buses("tokenizer", "decode") as (bus, other),
        running(Decode(config(folder, served, max_rank=8), other)) as decode,
    ):
        (served / "big").symlink_to(big)
        await eventually(lambda: any(card.problem for card in decode.models()))
        (card,) = [card for card in decode.models() if card.problem]
        assert card.name == "big"
        assert await tokens(bus, "tiny") == due(folder, None)


async def test_the_name_of_the_model_or_of_another_is_not_taken(
    folder: Path, tmp_path: Path
) -> None:
    served = tmp_path / "served"
    served.mkdir()
    adapter = write(folder, tmp_path / "first", 2, ["q_proj"], 1)
    given = config(folder, served, adapters=(f"polite={adapter}",))
    async with memory_buses("tokenizer", "decode") as (bus, other), running(Decode(given, other)):
        for name in ("tiny", "polite"):
            (served / name).symlink_to(write(folder, tmp_path / f"other-{name}", 2, ["q_proj"], 3))
        (served / "kind").symlink_to(adapter)
        await eventually(lambda: "kind" in names(bus))
        assert await tokens(bus, "tiny") == due(folder, None)
        assert await tokens(bus, "polite") == due(folder, adapter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grown_factors_keep_what_they_hold(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    factors = LoraFactors(2, 3, 40, 50, dtype)
    for slot, rank in ((0, 3), (1, 2)):
        factors.put(slot, torch.randn(rank, 40), torch.randn(50, rank), 0.5 + slot)
    grown = factors.grown(4, 9)
    assert len(grown.ranks_S) == 4
    assert grown.max_rank >= 9
    for slot in (0, 1):
        (down, up), (theirs, ours) = factors.factors(slot), grown.factors(slot)
        assert torch.equal(theirs[: len(down)], down)
        assert torch.equal(ours[:, : up.shape[1]], up)
        assert not theirs[len(down) :].any()
    assert grown.ranks_S.tolist() == [3, 2, 0, 0]
    grown.put(3, torch.randn(9, 40), torch.randn(50, 9), 1.0)


def test_a_folder_may_be_empty_at_start(folder: Path, tmp_path: Path) -> None:
    assert not os.listdir(tmp_path)
    config(folder, tmp_path).engine()
