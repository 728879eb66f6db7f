"""Which decode instance a request goes to, and the settings of the process."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from motet_shared.errors import ConfigError
from motet_shared.messages import PROTOCOL, Heartbeat, ModelCard
from motet_tokenizer.config import TokenizerConfig
from motet_tokenizer.router import PromptLoad, Router


class Directory:
    """What the router asks of a directory."""

    def __init__(self) -> None:
        self.beats: dict[str, Heartbeat] = {}
        self.open: Counter[str] = Counter()
        self.far: set[str] = set()
        self.site_margin = 4.0
        self.on_gone: list[Any] = []

    def announce(
        self, instance: str, seq: int = 0, context: int = 100, block_size: int = 0, **load: float
    ) -> None:
        cards = [ModelCard(name="m", context=context, block_size=block_size)]
        self.beats[instance] = Heartbeat(
            v=PROTOCOL,
            role="decode",
            instance=instance,
            state="ready",
            seq=seq,
            models=cards,
            load=load,
        )

    def ready(self, role: str, model: str) -> list[Heartbeat]:
        return [beat for beat in self.beats.values() if beat.models[0].name == model]

    def active(self, instance: str) -> float:
        return self.beats[instance].load.get("active", 0.0) + self.open[instance]

    def is_near(self, beat: Heartbeat) -> bool:
        return beat.instance not in self.far


class Index:
    """How many blocks of any prompt each instance holds."""

    def __init__(self, **held: int) -> None:
        self.blocks = {name.replace("_", "-"): count for name, count in held.items()}

    def held(self, instance: str, chain: list[int]) -> int:
        return min(self.blocks.get(instance, 0), len(chain))


def made(policy: str = "prefix", **held: int) -> tuple[Router, Directory]:
    directory: Any = Directory()
    index: Any = Index(**held)
    return Router(directory, index, policy), directory


def test_the_least_loaded_instance_is_picked() -> None:
    router, directory = made()
    directory.announce("decode-a", active=5.0)
    directory.announce("decode-b", active=3.0, queued=3.0)
    assert router.pick("m") == "decode-b"
    assert router.pick("m", {"decode-b"}) == "decode-a"
    assert router.pick("m", {"decode-a", "decode-b"}) is None
    assert router.pick("other") is None


def test_equals_take_turns() -> None:
    router, directory = made()
    for name in ("decode-a", "decode-b", "decode-c"):
        directory.announce(name)
    assert Counter(router.pick("m") for _ in range(9)) == {
        "decode-a": 3,
        "decode-b": 3,
        "decode-c": 3,
    }


def test_a_burst_between_two_heartbeats_is_spread() -> None:
    router, directory = made()
    directory.announce("decode-a", active=0.0)
    directory.announce("decode-b", active=4.0)
    for _ in range(12):
        directory.open[str(router.pick("m"))] += 1
    assert directory.open == {"decode-a": 8, "decode-b": 4}


def test_the_own_site_is_left_once_it_has_more_streams_than_the_margin_allows() -> None:
    router, directory = made()
    directory.far = {"decode-b"}
    for active, chosen in ((0.0, "decode-a"), (3.0, "decode-a"), (5.0, "decode-b")):
        directory.announce("decode-a", active=active)
        directory.announce("decode-b")
        assert router.pick("m") == chosen, active
    assert router.pick("m", {"decode-b"}) == "decode-a"


def test_the_smallest_context_counts() -> None:
    router, directory = made()
    assert router.context("m", 50) == 50
    directory.announce("decode-a", context=40)
    directory.announce("decode-b", context=0)
    assert router.context("m", 50) == 40


# ------------------------------------------------------------------------------------------------------------- prefixes
SPEED = {"prefill_token": 1e-3, "decode_row": 0.01}
PROMPT = PromptLoad(list(range(1000)))


def announce(directory: Directory, **load: dict[str, float]) -> None:
    for name, values in load.items():
        directory.announce(name.replace("_", "-"), 0, 100, 16, **{**SPEED, **values})


def test_a_prompt_goes_where_most_of_it_is_cached() -> None:
    router, directory = made(decode_a=0, decode_b=40, decode_c=20)
    announce(directory, decode_a={}, decode_b={}, decode_c={})
    assert router.pick("m", load=PROMPT) == "decode-b"
    assert router.pick("m", {"decode-b"}, PROMPT) == "decode-c"


def test_a_long_queue_outweighs_what_is_cached() -> None:
    router, directory = made(decode_a=0, decode_b=40)
    announce(directory, decode_a={}, decode_b={"prefill_default": 630.0})
    assert router.pick("m", load=PROMPT) == "decode-b"
    announce(directory, decode_a={}, decode_b={"prefill_default": 650.0})
    assert router.pick("m", load=PromptLoad(list(range(1000)))) == "decode-a"


def test_a_slow_instance_weighs_its_tokens() -> None:
    router, directory = made(decode_a=0, decode_b=40)
    announce(directory, decode_a={}, decode_b={"prefill_token": 4e-3})
    assert (
        router.pick("m", load=PROMPT) == "decode-a"
    )  # 360 tokens take longer there than 1,000 here


def test_running_streams_weigh_what_their_replies_take() -> None:
    router, directory = made(decode_a=0, decode_b=40)
    announce(directory, decode_a={}, decode_b={"active": 1.0})
    assert router.pick("m", load=PROMPT) == "decode-b"
    announce(
        directory, decode_a={}, decode_b={"active": 3.0}
    )  # 32 tokens each on average, of 10 ms
    assert router.pick("m", load=PROMPT) == "decode-a"
    for _ in range(200):
        router.note_reply(4)
    directory.announce("decode-a", 1, 100, 16, **SPEED)
    assert router.pick("m", load=PROMPT) == "decode-b"


def test_only_those_count_who_go_first() -> None:
    """A request of high priority passes by what waits at a lower one."""
    router, directory = made(decode_a=0, decode_b=0)
    announce(
        directory,
        decode_a={"prefill_flex": 5000.0, "prefill_default": 5000.0, "prefill_priority": 100.0},
        decode_b={"prefill_flex": 900.0, "prefill_default": 900.0, "prefill_priority": 900.0},
    )
    assert router.pick("m", load=PromptLoad(PROMPT.names, priority=1)) == "decode-a"
    assert router.pick("m", load=PromptLoad(PROMPT.names)) == "decode-b"
    assert router.pick("m", load=PromptLoad(PROMPT.names, priority=-7)) == "decode-b"


def test_what_was_sent_since_the_last_heartbeat_counts() -> None:
    router, directory = made(decode_a=0, decode_b=40)
    announce(directory, decode_a={}, decode_b={})
    chosen = Counter(router.pick("m", load=PROMPT) for _ in range(8))
    assert set(chosen) == {"decode-a", "decode-b"}
    assert chosen["decode-b"] > chosen["decode-a"]


def test_a_newcomer_without_a_pace_is_taken_for_as_fast_as_the_others() -> None:
    router, directory = made()
    announce(
        directory,
        decode_a={"prefill_default": 100.0},
        decode_b={"prefill_token": 0.0, "decode_row": 0.0},
    )
    assert router.pick("m", load=PROMPT) == "decode-b"


def test_other_policies_do_not_look_at_caches() -> None:
    router, directory = made("load", decode_a=60)
    announce(directory, decode_a={"active": 1.0}, decode_b={})
    assert router.pick("m", load=PROMPT) == "decode-b"
    router, directory = made("random", decode_a=60)
    announce(directory, decode_a={}, decode_b={"active": 50.0})
    assert {router.pick("m", load=PROMPT) for _ in range(64)} == {"decode-a", "decode-b"}


# ------------------------------------------------------------------------------------------------------------ settings
def test_models_have_the_name_of_their_folder_or_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "pocket-chat"
    config = TokenizerConfig(model=(str(folder), f"mine={folder}", "/a=b/c"))
    assert config.models() == {"pocket-chat": str(folder), "mine": str(folder), "c": "/a=b/c"}


@pytest.mark.parametrize("models", [(), ("=x",), ("x=",), ("a=x", "a=y")])
def test_wrong_models_are_refused(models: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as raised:
        TokenizerConfig(model=models)
    assert raised.value.param == "model"
