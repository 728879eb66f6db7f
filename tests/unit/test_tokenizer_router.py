"""Which decode instance a request goes to, and the settings of the process."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from motet_shared.errors import ConfigError
from motet_shared.messages import PROTOCOL, Heartbeat, ModelCard
from motet_tokenizer.config import TokenizerConfig
from motet_tokenizer.router import Router


class Directory:
    """What the router asks of a directory."""

    def __init__(self) -> None:
        self.beats: dict[str, Heartbeat] = {}
        self.open: Counter[str] = Counter()

    def announce(self, instance: str, seq: int = 0, context: int = 100, **load: float) -> None:
        cards = [ModelCard(name="m", context=context)]
        self.beats[instance] = Heartbeat(
            v=PROTOCOL, role="decode", instance=instance, state="ready", seq=seq, models=cards, load=load
        )

    def ready(self, role: str, model: str) -> list[Heartbeat]:
        return [beat for beat in self.beats.values() if beat.models[0].name == model]

    def instances(self, role: str) -> list[Heartbeat]:
        return list(self.beats.values())

    def outstanding(self, instance: str) -> int:
        return self.open[instance]


def made() -> tuple[Router, Directory]:
    directory: Any = Directory()
    return Router(directory), directory


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
    assert Counter(router.pick("m") for _ in range(9)) == {"decode-a": 3, "decode-b": 3, "decode-c": 3}


def test_a_burst_between_two_heartbeats_is_spread() -> None:
    router, directory = made()
    directory.announce("decode-a", active=0.0)
    directory.announce("decode-b", active=4.0)
    for _ in range(12):
        directory.open[str(router.pick("m"))] += 1
    assert directory.open == {"decode-a": 8, "decode-b": 4}


def test_own_streams_are_not_counted_twice() -> None:
    router, directory = made()
    directory.open["decode-a"] = 3
    directory.announce("decode-a", seq=1, active=3.0)  # all three are ours
    directory.announce("decode-b", seq=1, active=4.0)
    assert router.pick("m") == "decode-a"
    directory.open["decode-a"] = 0  # they have ended since
    directory.open["decode-b"] = 1
    assert router.pick("m") == "decode-a"


def test_the_smallest_context_counts() -> None:
    router, directory = made()
    assert router.context("m", 50) == 50
    directory.announce("decode-a", context=40)
    directory.announce("decode-b", context=0)
    assert router.context("m", 50) == 40


# ------------------------------------------------------------------------------------------------------------ settings
def test_models_have_the_name_of_their_folder_or_their_own(tmp_path: Path) -> None:
    folder = tmp_path / "pocket-chat"
    config = TokenizerConfig(model=(str(folder), f"mine={folder}", "/a=b/c"))
    assert config.models() == {"pocket-chat": str(folder), "mine": str(folder), "c": "/a=b/c"}


@pytest.mark.parametrize("models", [(), ("=x",), ("x=",), ("a=x", "a=y")])
def test_wrong_models_are_refused(models: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="model: "):
        TokenizerConfig(model=models)
