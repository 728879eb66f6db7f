"""Workers with adapters on the in-memory bus: chosen by name, loaded in the background, given up for others, moved."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from motet_llm.adapters import adapter_cache as residents
from motet_llm.config import DecodeConfig
from motet_llm.service import Decode
from motet_llm.serving import prefill_service
from motet_shared.errors import BadRequest, DeadlineExceeded, UnknownModel
from motet_shared.messages import Chat, Generate, Sampling, Text, Tokens
from motet_shared.testing import memory_buses, running
from motet_shared.wire.bus import Bus
from motet_tokenizer.config import TokenizerConfig
from motet_tokenizer.router import Router
from motet_tokenizer.service import Tokenizer
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.checkpoints.lora_folders import change_config, make_adapter, with_adapter
from support.running.refusals import refuses

PROMPT = [(7 * i * i + i) % 250 for i in range(60)]
COUNT = 8
PATIENT = 20.0
NAMES = ("one", "two", "three")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("worker") / "tiny"
    path.mkdir()
    return tiny_checkpoint("llama", path, hidden_size=32, head_dim=8)


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three, and one that is of no use."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate((*NAMES, "bad")):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        make_adapter(model, root / name, seed=seed, strength=0.5)
    change_config(root / "bad", use_dora=True)
    return root


@pytest.fixture(scope="module")
@torch.inference_mode()
def due(folder: Path, adapters: Path) -> dict[str, list[int]]:
    found = {}
    for name in ("tiny", *NAMES):
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        model = model if name == "tiny" else with_adapter(model, adapters / name)
        tokens = list(PROMPT)
        for _ in range(COUNT):
            tokens.append(
                int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
            )
        found[name] = tokens[len(PROMPT) :]
    assert len(set(map(tuple, found.values()))) == len(found)
    return found


def config(folder: Path, adapters: Path, **more: Any) -> DecodeConfig:
    options: dict[str, Any] = {
        "num_blocks": 128,
        "threads": 1,
        "metrics_port": -1,
        "max_running": 8,
    }
    return DecodeConfig(**options | {"model": str(folder), "adapter_folder": str(adapters)} | more)


@asynccontextmanager
async def world(folder: Path, adapters: Path, **more: Any) -> AsyncIterator[World]:
    async with (
        memory_buses("tokenizer", "decode") as (tokenizer, bus),
        running(Decode(config(folder, adapters, **more), bus)) as decode,
    ):
        yield World(tokenizer, decode)
        await eventually(lambda: not decode.stats()["running"])
        decode.check_integrity()


@dataclass
class World:
    bus: Bus
    decode: Decode

    async def tokens(self, model: str, **fields: Any) -> list[int]:
        found: list[int] = []
        async with self.open(model, **fields) as stream:
            async for body in stream:
                assert isinstance(body, Tokens)
                found += body.ids
        return found

    def open(
        self, model: str, *, deadline: float | None = None, window: int = 64, **fields: Any
    ) -> Any:
        sampling = Sampling(temperature=0, max_tokens=COUNT, ignore_eos=True)
        request = msgspec.structs.replace(
            Generate(model=model, prompt=PROMPT, sampling=sampling), **fields
        )
        return self.bus.open("decode", request, deadline=deadline, window=window)

    def resident(self) -> set[str]:
        return {card.name for card in self.decode.models() if card.parent and card.resident}


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENT):
        while not condition():  # noqa: ASYNC110  # other threads change what is waited for
            await asyncio.sleep(0.01)


async def test_all_are_announced_and_chosen_by_name(
    folder: Path, adapters: Path, due: dict[str, list[int]]
) -> None:
    async with world(folder, adapters) as here:
        names = ["tiny", *NAMES, "tiny", "one"]
        found = await asyncio.gather(*(here.tokens(name) for name in names))
        assert found == [due[name] for name in names]
        await eventually(lambda: here.resident() == set(NAMES))
        cards = {card.name: card for card in here.decode.models()}
        assert {name: card.parent for name, card in cards.items()} == {"tiny": ""} | dict.fromkeys(
            (*NAMES, "bad"), "tiny"
        )
        assert (
            len({card.hash_root for card in cards.values()}) == 4
        )  # the one of no use has none of its own
        assert len({cards[name].kv_format for name in ("tiny", *NAMES)}) == 4
        stats = here.decode.stats()
        assert (stats["adapter_loads"], stats["adapter_evictions"], stats["adapters_refused"]) == (
            3,
            0,
            1,
        )


async def test_what_cannot_be_served_is_told_to_who_asks(
    folder: Path, adapters: Path, due: dict[str, list[int]]
) -> None:
    async with world(folder, adapters) as here:
        with refuses(BadRequest, "model"):
            await here.tokens("bad")
        with refuses(UnknownModel, "model"):
            await here.tokens("four")
        assert await here.tokens("two") == due["two"]


async def test_one_slot_serves_them_one_after_another(
    folder: Path, adapters: Path, due: dict[str, list[int]]
) -> None:
    async with world(folder, adapters, max_adapters=1) as here:
        names = [*NAMES, "tiny", *NAMES, "three", "one"]
        found = await asyncio.gather(*(here.tokens(name) for name in names))
        assert found == [due[name] for name in names]
        stats = here.decode.stats()
        assert stats["adapter_slots"] == 1
        assert stats["adapter_loads"] == stats["adapter_evictions"] + 1 >= 3
        assert len(here.resident()) == 1


async def test_who_waits_for_a_slot_may_leave_or_be_late(
    folder: Path, adapters: Path, due: dict[str, list[int]]
) -> None:
    async with world(folder, adapters, max_adapters=1) as here:
        held = here.open("one", window=1)
        async with held:
            await anext(aiter(held))  # and reads no more: its place is kept
            with pytest.raises(DeadlineExceeded):
                await here.tokens("two", deadline=0.3)
            leaving = asyncio.create_task(here.tokens("three"))
            waiting = asyncio.create_task(here.tokens("two"))
            await eventually(lambda: here.decode.stats()["adapters_waiting"] == 2)
            leaving.cancel()
            await eventually(lambda: here.decode.stats()["adapters_waiting"] == 1)
            assert await here.tokens("tiny") == due["tiny"]
            assert not waiting.done()
        assert await waiting == due["two"]


async def test_who_waits_long_is_not_passed_for_ever(
    folder: Path, adapters: Path, due: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residents, "OVERTAKING_SECONDS", 0.2)
    ended: list[str] = []

    async def note(model: str) -> None:
        assert await here.tokens(model) == due[model]
        ended.append(model)

    async with world(folder, adapters, max_adapters=1) as here:
        held = here.open("one", window=1)
        async with held:
            await anext(aiter(held))
            waiting = asyncio.create_task(note("two"))
            await asyncio.sleep(0.05)
            await note("one")  # the adapter is there, and "two" has not waited long
            await asyncio.sleep(0.3)
            later = asyncio.create_task(note("one"))
            await eventually(lambda: here.decode.stats()["adapters_waiting"] == 2)
        await asyncio.gather(waiting, later)
    assert ended == ["one", "two", "one"]


async def test_nobody_waits_for_somebody_elses_adapter(
    folder: Path, adapters: Path, due: dict[str, list[int]]
) -> None:
    async with world(folder, adapters) as here:
        bank = here.decode.thread.engine.runner.adapters
        assert bank is not None
        load, go_on = bank.load, threading.Event()

        def slowly(name: str, slot: int) -> Any:
            assert go_on.wait(PATIENT)
            return load(name, slot)

        bank.load = slowly  # type: ignore[method-assign]
        waiting = [asyncio.create_task(here.tokens("one")) for _ in range(2)]
        await eventually(lambda: here.decode.stats()["adapters_waiting"] == 2)
        assert await here.tokens("tiny") == due["tiny"]
        assert here.resident() == set()
        go_on.set()
        assert await asyncio.gather(*waiting) == [due["one"]] * 2
        assert here.decode.stats()["adapter_loads"] == 1


async def test_a_slot_is_not_written_while_a_cancelled_step_still_reads_it(
    folder: Path, adapters: Path, due: dict[str, list[int]]
) -> None:
    """Else the cache would keep what the next adapter made of the last one's tokens."""
    async with world(folder, adapters, max_adapters=1, token_budget=8) as here:
        for number in range(6):
            async with here.open("one", prompt=PROMPT[:-1]) as stream:
                await stream.start()
                await asyncio.sleep(0.003 * number)  # at one moment or another of its prompt
            assert await here.tokens("two") == due["two"]
            assert await here.tokens("one") == due["one"]


async def test_a_request_moves_with_its_adapter(
    folder: Path, adapters: Path, due: dict[str, list[int]]
) -> None:
    async with world(folder, adapters) as here:
        assert await here.tokens("two", output=due["two"][:3]) == due["two"][3:]


async def test_prompts_are_prefilled_elsewhere_with_the_adapter(
    folder: Path, adapters: Path, due: dict[str, list[int]], tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).symlink_to(adapters / name)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    make_adapter(model, tmp_path / "three", seed=77)  # another one of this name
    common: dict[str, Any] = {"remote_prefill": "always"}
    async with memory_buses("tokenizer", "decode", "prefill") as (tokenizer, bus, other):
        there = prefill_service.Prefill(
            config(folder, tmp_path, role="prefill", transfer_memory=1 << 20), other
        )
        async with (
            running(there),
            running(Decode(config(folder, adapters, **common), bus)) as decode,
        ):
            here = World(tokenizer, decode)
            await eventually(lambda: decode.stats()["prefill_workers"] == 1)
            for number, name in enumerate(("one", "tiny", "two"), start=1):
                assert await here.tokens(name) == due[name]
                assert decode.stats()["remote_prefills"] == number
            assert not decode.stats()["prefill_fallbacks"]
            assert await here.tokens("three") == due["three"]
            assert decode.stats()["remote_prefills"] == 3
            await eventually(lambda: there.stats()["running"] == 0)
            there.check_integrity()
            decode.check_integrity()


async def test_a_chat_finds_the_adapter_behind_a_tokenizer_of_the_model(
    folder: Path, adapters: Path
) -> None:
    async with memory_buses("gateway", "tokenizer", "decode", "decode") as (
        gateway,
        bus,
        first,
        second,
    ):
        settings = TokenizerConfig(model=(f"tiny={folder}",), metrics_port=-1)
        with_two = config(folder, adapters)
        async with (
            running(Tokenizer(settings, bus)) as tokenizer,
            running(Decode(config(folder, adapters, adapter_folder=""), first)),
            running(Decode(with_two, second)) as decode,
        ):
            await gateway.directory.wait_for(
                lambda d: len(d.ready("decode", model="tiny")) == 2, PATIENT
            )
            await bus.directory.wait_for(lambda d: d.ready("decode", model="two"), PATIENT)
            texts: dict[str, list[int]] = {}
            for name in ("tiny", "two", "one", "two"):
                ids = await said(gateway, name)
                assert texts.setdefault(name, ids) == ids
            assert len(set(map(tuple, texts.values()))) == 3
            assert decode.stats()["adapter_loads"] == 2
            router = Router(bus.directory)
            assert {router.pick("two") for _ in range(4)} == {second.instance}
            with refuses(UnknownModel, "model"):
                await said(gateway, "four")
            tokenizer.check_integrity()


async def said(gateway: Bus, model: str) -> list[int]:
    """The tokens of a chat."""
    sampling = Sampling(temperature=0, ignore_eos=True)
    messages = [{"role": "user", "content": "Hello"}]
    async with gateway.open(
        "tokenizer", Chat(model=model, messages=messages, sampling=sampling, max_tokens=8)
    ) as stream:
        return [token async for item in stream if isinstance(item, Text) for token in item.ids]
