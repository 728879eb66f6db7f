"""Heads that guess: read from either layout, right where they can be, refused where they are not of the model."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.speculation.medusa import MedusaDrafts, are_heads
from motet_shared.errors import ConfigError
from motet_shared.messages import Sampling
from support.checkpoints.language_checkpoints import VOCAB, tiny_checkpoint
from support.running.refusals import refuses

HIDDEN, HEADS = 32, 3
PROMPT = [10, 20, 30, 40, 50]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny"), hidden_size=HIDDEN, head_dim=8)


def own_names(number: int, layer: int) -> str:
    """As Medusa saves them."""
    return f"{number}.{layer}.linear" if layer < 1 else f"{number}.{layer}"


def vllm_names(number: int, layer: int) -> str:
    return (
        f"medusa_heads.blocks.{number}.layers.{layer}"
        if layer < 1
        else f"medusa_heads.lm_heads.{number}"
    )


def write_heads(
    path: Path, name: Callable[[int, int], str] = own_names, bias: bool = True, **config: Any
) -> tuple[Path, dict[str, Tensor]]:
    """Random heads of one layer each, and their tensors."""
    path.mkdir(parents=True, exist_ok=True)
    random = torch.Generator().manual_seed(4)
    tensors: dict[str, Tensor] = {}
    for number in range(HEADS):
        tensors[f"{name(number, 0)}.weight"] = 0.2 * torch.randn(HIDDEN, HIDDEN, generator=random)
        if bias:
            tensors[f"{name(number, 0)}.bias"] = 0.1 * torch.randn(HIDDEN, generator=random)
        tensors[f"{name(number, 1)}.weight"] = 0.3 * torch.randn(VOCAB, HIDDEN, generator=random)
    given: dict[str, Any] = (
        {"medusa_num_heads": HEADS, "medusa_num_layers": 1} if name is own_names else {}
    )
    given = given or {
        "model_type": "medusa",
        "num_heads": HEADS,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
    }
    (path / "config.json").write_text(json.dumps({**given, **config}))
    save_file(tensors, path / "medusa_lm_head.safetensors")
    return path, tensors


def make_engine(folder: Path, speculate: str = "off", **options: Any) -> Engine:
    sizes = {
        "block_size": 4,
        "num_blocks": 100,
        "token_budget": 64,
        "max_running": 8,
        "decode_slowdown": 0,
    }
    given = {
        "threads": 1,
        "overlap": False,
        "always_speculate": True,
        "draft_tokens": HEADS,
        **sizes,
        **options,
    }
    return Engine(EngineConfig(model=str(folder), speculate=speculate, **given))


def answers(engine: Engine, count: int = 5, **sampling: Any) -> dict[Hashable, list[int]]:
    found: dict[Hashable, list[int]] = {}
    for key in range(count):
        wish = {
            "temperature": key % 2,
            "seed": key,
            "max_tokens": 20,
            "ignore_eos": True,
            **sampling,
        }
        engine.add(key, [*PROMPT, key], Sampling(**wish))
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            found.setdefault(output.key, []).extend(output.ids)
        engine.check_integrity()
    return found


def test_wrong_guesses_change_nothing(folder: Path, tmp_path: Path) -> None:
    path, _ = write_heads(tmp_path)
    engine = make_engine(folder, str(path))
    assert answers(engine) == answers(make_engine(folder))
    assert engine.stats()["drafted_tokens"] > 50


@pytest.mark.parametrize("names", [own_names, vllm_names])
def test_a_head_computes_what_its_tensors_say(
    folder: Path, tmp_path: Path, names: Callable[[int, int], str]
) -> None:
    path, tensors = write_heads(tmp_path, names)
    assert are_heads(path)
    assert not are_heads(folder)
    engine = make_engine(folder, str(path))
    assert engine.speculation is not None
    drafts: Any = engine.speculation.drafts
    assert isinstance(drafts, MedusaDrafts)
    hidden_BX = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(1))
    for number, head in enumerate(drafts.heads):
        inner, onto = names(number, 0), names(number, 1)
        layer = hidden_BX @ tensors[f"{inner}.weight"].T + tensors[f"{inner}.bias"]
        expected = (hidden_BX + torch.nn.functional.silu(layer)) @ tensors[f"{onto}.weight"].T
        torch.testing.assert_close(head(hidden_BX), expected, rtol=1e-4, atol=1e-4)


def test_a_head_gets_the_hidden_state_behind_the_last_right_token(
    folder: Path, tmp_path: Path
) -> None:
    """Heads that see nothing in their layers and have the model's own matrix guess what it has just drawn: under greedy
    decoding a token that follows itself is then guessed rightly, and only such a one."""
    path, tensors = write_heads(tmp_path / "heads", bias=False)
    matrix = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    for number in range(HEADS):
        tensors[f"{number}.0.linear.weight"].zero_()
        tensors[f"{number}.1.weight"].copy_(matrix)
    save_file(tensors, path / "medusa_lm_head.safetensors")
    engine = make_engine(folder, str(path))
    assert engine.speculation is not None
    drafts: Any = engine.speculation.drafts
    proposed: list[tuple[int, list[int]]] = []
    propose = drafts.propose

    def noting(wanted: Any) -> Any:
        found = propose(wanted)
        proposed.extend((request.tokens[-1], draft) for request, draft in found.items())
        return found

    drafts.propose = noting
    answers(engine, temperature=0, max_tokens=12)
    assert len(proposed) > 10
    assert all(draft == [last] * len(draft) for last, draft in proposed)


def test_the_matrix_of_the_first_head_serves_those_without(folder: Path, tmp_path: Path) -> None:
    path, tensors = write_heads(tmp_path, vllm_names)
    for number in range(1, HEADS):
        del tensors[f"medusa_heads.lm_heads.{number}.weight"]
    save_file(tensors, path / "medusa_lm_head.safetensors")
    engine = make_engine(folder, str(path))
    assert engine.speculation is not None
    heads: Any = engine.speculation.drafts.heads  # type: ignore[attr-defined]
    assert heads[0].lm_head is heads[2].lm_head


def test_heads_of_another_model_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    other = tiny_checkpoint("llama", tmp_path / "wide", hidden_size=64, head_dim=16)
    path, tensors = write_heads(tmp_path / "heads")
    with refuses(ConfigError, "speculate"):
        make_engine(other, str(path))
    del tensors["2.1.weight"]
    save_file(tensors, path / "medusa_lm_head.safetensors")
    with refuses(ConfigError, "speculate"):
        make_engine(folder, str(path))
    path, _ = write_heads(tmp_path / "fewer", medusa_num_heads=2)
    with pytest.raises(ConfigError, match=r"2\.0\.linear\.bias"):
        make_engine(folder, str(path))
    path, _ = write_heads(tmp_path / "none", medusa_num_heads=0)
    with pytest.raises(ConfigError, match=r"0 .*1 .*1 to 32"):
        make_engine(folder, str(path))
    (path / "config.json").write_text(json.dumps({"medusa_num_heads": 1}))
    (path / "medusa_lm_head.safetensors").rename(path / "medusa_lm_head.pt")
    with pytest.raises(ConfigError, match=r"\*\.safetensors"):
        make_engine(folder, str(path))
