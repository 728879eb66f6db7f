"""Files of the disk cache that are changed under a decode worker: prompts are computed again, the engine lives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.scheduling.step_time import StepTimeEstimate
from motet_shared.messages import Sampling
from support.checkpoints.language_checkpoints import tiny_checkpoint

PROMPTS = [[(7 * key + t) % 250 for t in range(40)] for key in range(4)]


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").write_bytes(b"x")


def link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)  # to itself


def empty(path: Path) -> None:
    path.write_bytes(b"")


def longer(path: Path) -> None:
    with path.open("ab") as file:
        file.truncate(1 << 40)  # sparse: reading all of it would take a terabyte


FAULTS: dict[str, Callable[[Path], None]] = {
    "directory": directory,
    "link": link,
    "gone": Path.unlink,
    "empty": empty,
    "longer": longer,
}


def reply(engine: Engine, key: str, prompt: list[int]) -> list[int]:
    engine.add(key, prompt, Sampling(max_tokens=4, temperature=0, ignore_eos=True))
    ids: list[int] = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            ids += output.ids
        engine.check_integrity()
    return ids


@pytest.mark.parametrize("fault", FAULTS)
def test_whatever_takes_the_place_of_a_file_costs_only_time(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        StepTimeEstimate, "prefill_token", 1.0
    )  # seconds: reading is always worth it
    cache = tmp_path / "cache"
    cache.mkdir()
    engine = Engine(
        EngineConfig(
            model=str(tiny_checkpoint("llama", tmp_path / "model")),
            threads=1,
            block_size=4,
            num_blocks=12,
            token_budget=32,
            max_running=8,
            host_cache=0,
            disk_cache=1 << 20,
            cache_folder=str(cache),
        )
    )
    first = [reply(engine, f"first {number}", prompt) for number, prompt in enumerate(PROMPTS)]
    files = list(cache.glob("*/*.kv"))
    assert files
    for path in files:
        FAULTS[fault](path)
    assert [
        reply(engine, f"again {number}", prompt) for number, prompt in enumerate(PROMPTS)
    ] == first
    engine.close()
    assert not list(cache.iterdir())
