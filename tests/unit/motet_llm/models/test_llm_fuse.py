"""Packed models compute what transformers' own do, and replacements are taken only where they give the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from motet_kernels.linear.pack import pack_linear
from motet_kernels.runtime import native
from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.models.fuse import optimize
from motet_llm.models.fused_layers import FusedLayer, Norm
from motet_llm.models.joined_linear import JoinedLinear, JoinedPart
from motet_shared.errors import ConfigError
from motet_shared.messages import Sampling
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.running.refusals import refuses

PROMPT = [(7 * i) % 250 for i in range(20)]


def engine_of(folder: Path, **settings: Any) -> Engine:
    defaults = {
        "threads": 1,
        "num_blocks": 64,
        "max_running": 8,
        "token_budget": 64,
        "decode_slowdown": 0.0,
    }
    return Engine(EngineConfig(model=str(folder), **{**defaults, **settings}))


def answer(
    engine: Engine, company: int = 0, prompt: list[int] = PROMPT
) -> tuple[list[int], list[float]]:
    """Greedy tokens and log-probabilities of a request, beside others of other lengths."""
    for i in range(company):
        engine.add(
            f"other {i}",
            prompt[: 1 + 3 * i],
            Sampling(max_tokens=4 + i, temperature=0, ignore_eos=True),
        )
    engine.add("a", prompt, Sampling(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0))
    ids: list[int] = []
    logprobs: list[float] = []
    while engine.has_work:
        for output in engine.step():
            if output.key == "a":
                ids += output.ids
                logprobs += [entry.logprob for entry in output.logprobs or []]
    return ids, logprobs


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_plain_families_are_packed_and_take_the_short_way(family: str, tmp_path: Path) -> None:
    runner = engine_of(tiny_checkpoint(family, tmp_path)).runner
    assert runner.fused["layers"] == 2
    assert not [module for module in runner.model.modules() if type(module) is torch.nn.Linear]


def test_a_tied_head_costs_no_second_copy(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    head = 259 * 64 * 4
    weights = sum(p.nbytes for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
    assert weights <= engine_of(folder).stats()["weight_bytes"] < weights + head


class Reader(torch.nn.Module):
    """Call one of its matrices, and read the weights of the others in several ways."""

    __module__ = "transformers.models.reader"

    def __init__(self) -> None:
        super().__init__()
        self.called = torch.nn.Linear(32, 32)
        self.read = torch.nn.Linear(32, 32)
        self.nested = torch.nn.Linear(32, 32)
        self.shown = torch.nn.Linear(32, 32)
        self.decorated = torch.nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The text `self.called.weight` reads nothing.
        called: torch.Tensor = self.called(x)
        return called @ self.read.weight

    def map(self, rows: list[torch.Tensor]) -> list[torch.Tensor]:
        return list(map(lambda row: row @ self.nested.weight.T, rows))

    @property
    def dtype(self) -> torch.dtype:
        return self.shown.weight.dtype

    @torch.no_grad()
    def norm(self) -> torch.Tensor:
        return self.decorated.weight.norm()


def test_a_matrix_whose_weight_model_code_reads_is_not_packed(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("llama", tmp_path))
    model.reader = reader = Reader()
    optimize(model, "float32", torch.float32)
    kept = {name for name, child in reader.named_children() if type(child) is torch.nn.Linear}
    assert kept == {"read", "nested", "shown", "decorated"}


@pytest.mark.long(after=1)
@pytest.mark.parametrize("weights", ["bfloat16", "int8", "int4", "float8"])
def test_rounding_keeps_no_layer_from_the_shorter_way(weights: str, tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_attention_heads": 8,
        "head_dim": 64,
    }
    folder = tiny_checkpoint("qwen3", tmp_path, num_hidden_layers=12, **sizes)
    assert engine_of(folder, weights=weights).runner.fused["layers"] == 12


@pytest.mark.parametrize(
    ("weights", "tolerance"), [("bfloat16", 0.1), ("int8", 0.3), ("int4", 1.5), ("float8", 1.0)]
)
def test_formats_stay_near_the_exact_weights(
    weights: str, tolerance: float, tmp_path: Path
) -> None:
    folder = tiny_checkpoint("qwen3", tmp_path)
    exact, rounded = (answer(engine_of(folder, weights=w))[1][0] for w in ("float32", weights))
    assert abs(exact - rounded) < tolerance
    assert exact != rounded


def test_a_bfloat16_checkpoint_computes_nearly_as_its_weights_in_float32(tmp_path: Path) -> None:
    """Only what matrices take in is rounded: sums, norms and attention stay float32."""
    folder = tiny_checkpoint("llama", tmp_path / "wide")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "narrow")
    model.float().save_pretrained(tmp_path / "rounded")
    narrow, rounded = (tmp_path / name for name in ("narrow", "rounded"))
    engine = engine_of(narrow, kv_dtype="float32")
    assert engine.runner.describe()["weights"] == "bfloat16"
    ids, logprobs = answer(engine)
    expected = answer(engine_of(rounded))
    assert ids == expected[0]
    assert logprobs == pytest.approx(expected[1], abs=0.02)


# -------------------------------------------------------------------------------------------------------- deterministic
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_in_deterministic_mode_company_changes_no_bit(family: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, tmp_path)
    alone = answer(engine_of(folder, deterministic=True))
    for company, settings in (
        (3, {}),
        (6, {"token_budget": 9}),
        (5, {"block_size": 4, "num_blocks": 30}),
    ):
        assert answer(engine_of(folder, deterministic=True, **settings), company) == alone


def test_deterministic_mode_refuses_what_it_cannot_keep(tmp_path: Path) -> None:
    """torch's matrix products round by the size of the batch."""
    native.select("off")
    try:
        with refuses(ConfigError, "deterministic"):
            engine_of(tiny_checkpoint("llama", tmp_path, hidden_size=256), deterministic=True)
    finally:
        native.select("")


# ------------------------------------------------------------------------------------------------------------- siblings
def test_siblings_are_one_product_whoever_asks_first() -> None:
    weight = torch.randn(12, 8)
    joined = JoinedLinear(pack_linear(weight, None, "float32"))
    first, second = JoinedPart(joined, 0, 5), JoinedPart(joined, 5, 12)
    x, y = torch.randn(1, 3, 8), torch.randn(1, 3, 8)
    for order in ((first, second), (second, first), (first, first), (second, second)):
        for part in order:
            torch.testing.assert_close(part(x), x @ weight[part.start : part.stop].T)
    first(x)
    torch.testing.assert_close(
        second(y), y @ weight[5:].T, msg="an output of another input was handed out"
    )


def test_a_layer_without_a_layout_is_an_error() -> None:
    layer = FusedLayer.__new__(FusedLayer)
    torch.nn.Module.__init__(layer)
    layer.layer_idx = 3
    with pytest.raises(ConfigError, match="layer 3"):
        layer(torch.zeros(1, 2, 4))


def test_norms_are_alike_by_what_they_add() -> None:
    assert Norm(torch.ones(2), 1e-6, 0.0).like(Norm(torch.zeros(2), 1e-6, 0.0))
    assert not Norm(torch.ones(2), 1e-6, 0.0).like(Norm(torch.ones(2), 1e-6, 1.0))
