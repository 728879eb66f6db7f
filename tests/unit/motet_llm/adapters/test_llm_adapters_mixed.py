"""Whatever is in a batch, every reply is the one that its request has alone: adapters, grammars and sampling mixed.

Random requests arrive at random steps in an engine whose pool is too small for all of them; some are cancelled, some
move to another engine with the tokens that they have. What each of them has to say comes from an engine that serves it
alone, and computes token by token; what that says with an adapter is peft's (`test_llm_adapters.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from motet_llm.adapters.bank import ResidentAdapter
from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.grammar.grammar import Grammar, GrammarState
from motet_llm.grammar.token_spelling import Spelling
from motet_shared import messages
from motet_shared.messages import Sampling
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.checkpoints.lora_folders import make_adapter

ADAPTERS = ("", "one", "two", "three")
GRAMMARS = ("", "[a-f0-9]{18}", "(yes|no|maybe, )+")
BASE = [
    5,
    9,
    13,
    21,
    34,
    55,
    89,
    144,
    5,
    9,
    13,
    22,
    7,
    5,
    9,
    13,
    21,
    34,
]  # repeats itself, as guesses need it
SPECULATION = ("off", "ngram")


@dataclass(frozen=True)
class Wish:
    adapter: str
    grammar: str
    temperature: float
    length: int  # of the prompt

    @property
    def sampling(self) -> Sampling:
        return Sampling(
            seed=3, temperature=self.temperature, max_tokens=14, ignore_eos=not self.grammar
        )


@dataclass(frozen=True)
class Event:
    """A request that comes after so many steps, and what becomes of it after so many more."""

    wish: Wish
    after: int
    fate: str  # "stays", "leaves" or "moves"
    steps: int


class Stage:
    """Engines with the same weights and adapters, each adapter in the same slot."""

    def __init__(self, folder: Path, adapters: Path, speculate: str):
        common: dict[str, Any] = {
            "model": str(folder),
            "adapter_folder": str(adapters),
            "threads": 1,
        }
        common |= {"deterministic": True, "decode_slowdown": 0, "dtype": "float32", "block_size": 4}
        small: dict[str, Any] = {
            "num_blocks": 24,
            "token_budget": 16,
            "max_running": 5,
            "speculate": speculate,
        }
        self.alone = Engine(EngineConfig(**common, num_blocks=64))
        self.engines = [Engine(EngineConfig(**common, **small)) for _ in range(2)]
        self.adapters = {id(engine): self._load(engine) for engine in (self.alone, *self.engines)}
        runner = self.alone.runner
        spelling = Spelling.load(str(folder), runner.vocab, runner.eos_ids)
        self.grammars = {
            text: Grammar(messages.Grammar(kind="regex", text=text), spelling)
            for text in GRAMMARS
            if text
        }
        self._due: dict[Wish, list[int]] = {}

    def _load(self, engine: Engine) -> dict[str, ResidentAdapter]:
        bank = engine.runner.adapters
        assert bank is not None
        return {name: bank.load(name, slot) for slot, name in enumerate(bank.names)}

    def add(self, engine: Engine, key: int, wish: Wish, output: list[int]) -> None:
        grammar, adapter = (
            self.grammars.get(wish.grammar),
            self.adapters[id(engine)].get(wish.adapter),
        )
        grammar_state: GrammarState | None = None if grammar is None else grammar.start(output)
        engine.add(
            key,
            BASE[: wish.length],
            wish.sampling,
            output=list(output),
            grammar_state=grammar_state,
            adapter=adapter,
        )

    def due(self, wish: Wish) -> list[int]:
        if wish not in self._due:
            self.add(self.alone, 0, wish, [])
            found: list[int] = []
            while self.alone.has_work:
                for output in self.alone.step():
                    assert output.error is None
                    found += output.ids
            self._due[wish] = found
        return self._due[wish]

    def play(self, events: list[Event]) -> dict[int, list[int]]:
        """The tokens of those that stay to their end."""
        ids: dict[int, list[int]] = {}
        where = dict.fromkeys(range(len(events)), self.engines[0])
        gone: set[int] = set()
        clock = 0
        while clock <= max(e.after + e.steps for e in events) or any(
            engine.has_work for engine in self.engines
        ):
            for key, event in enumerate(events):
                if clock == event.after:
                    ids[key] = []
                    self.add(where[key], key, event.wish, [])
                if clock == event.after + event.steps and event.fate != "stays" and key not in gone:
                    self._part(event, key, ids[key], where, gone)
            for engine in self.engines:
                for output in engine.step():
                    assert output.error is None
                    key = int(str(output.key))
                    ids[key] += output.ids
                    if output.finish is not None:
                        gone.add(key)
                engine.check_integrity()
            clock += 1
        assert all(e.stats()["blocks_free"] == e.stats()["blocks_total"] for e in self.engines)
        return {key: found for key, found in ids.items() if events[key].fate != "leaves"}

    def _part(
        self, event: Event, key: int, ids: list[int], where: dict[int, Engine], gone: set[int]
    ) -> None:
        where[key].cancel(key)
        if event.fate == "leaves":
            gone.add(key)
            return
        where[key] = self.engines[1]
        self.add(where[key], key, event.wish, ids)

    def close(self) -> None:
        for engine in (self.alone, *self.engines):
            engine.close()


@pytest.fixture(scope="module", params=SPECULATION)
def stage(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tiny_checkpoint("qwen3", tmp_path_factory.mktemp("model"), hidden_size=32)
    adapters = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(ADAPTERS[1:]):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        make_adapter(model, adapters / name, seed=seed, r=3 + 4 * seed, strength=0.4)
    made = Stage(folder, adapters, request.param)
    yield made
    made.close()
    torch.set_num_threads(threads)


WISHES = st.builds(
    Wish,
    adapter=st.sampled_from(ADAPTERS),
    grammar=st.sampled_from(GRAMMARS),
    temperature=st.sampled_from([0.0, 0.8]),
    length=st.sampled_from([5, 13, len(BASE)]),
)
EVENTS = st.builds(
    Event,
    wish=WISHES,
    after=st.integers(0, 20),
    fate=st.sampled_from(["stays", "stays", "moves", "leaves"]),
    steps=st.integers(0, 12),
)


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(events=st.lists(EVENTS, min_size=4, max_size=14))
def test_every_reply_is_the_one_that_its_request_has_alone(
    stage: Stage, events: list[Event]
) -> None:
    found = stage.play(events)
    assert found == {
        key: stage.due(event.wish) for key, event in enumerate(events) if event.fate != "leaves"
    }


def test_the_replies_differ_by_adapter_and_the_pool_is_short(stage: Stage) -> None:
    """Else the property above would prove nothing."""
    wishes = [Wish(adapter, "", 0.0, len(BASE)) for adapter in ADAPTERS]
    assert len({tuple(stage.due(wish)) for wish in wishes}) == len(wishes)
    events = [Event(wish, 0, "stays", 0) for wish in [*wishes, *wishes]]
    assert list(stage.play(events).values()) == [stage.due(event.wish) for event in events]
    assert stage.engines[0].stats()["preemptions"] > 0
