"""Settings and requests that cannot be followed are refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from motet_llm.config import EngineConfig
from motet_llm.engine.validation import check_sampling, check_tokens
from motet_shared.errors import BadRequest, ConfigError
from motet_shared.messages import Sampling
from support.running.refusals import refuses

VOCAB = 259


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.1},
        {"top_k": -1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": math.inf},
        {"max_tokens": 0},
        {"logprobs": 21},
        {"logit_bias": {VOCAB: 1.0}},
        {"logit_bias": {1: 101.0}},
        {"stop_token_ids": [-1]},
    ],
)
def test_sampling_that_cannot_be_followed_is_refused_by_name(
    sampling: dict[str, Any],
) -> None:
    with refuses(BadRequest, next(iter(sampling))):
        check_sampling(Sampling(**sampling), vocab=VOCAB, max_logprobs=20)


@pytest.mark.parametrize(
    ("prompt", "output", "param"),
    [
        ([], [], "prompt"),
        ([1, VOCAB], [], "prompt"),
        ([1], [-5], "output"),
    ],
)
def test_tokens_that_the_model_lacks_are_refused(
    prompt: list[int], output: list[int], param: str
) -> None:
    with refuses(BadRequest, param):
        check_tokens(prompt, output, vocab=VOCAB)


def test_the_edges_of_every_range_are_allowed() -> None:
    for sampling in (
        Sampling(temperature=0, top_p=1.0, min_p=0.0, top_k=0, logprobs=-1, max_tokens=1),
        Sampling(temperature=100, min_p=1.0, presence_penalty=-2, frequency_penalty=2, logprobs=20),
        Sampling(
            logit_bias={0: -100, VOCAB - 1: 100}, stop_token_ids=[0, VOCAB - 1], seed=-(1 << 80)
        ),
    ):
        check_sampling(sampling, vocab=VOCAB, max_logprobs=20)
    check_tokens([0, VOCAB - 1], [], vocab=VOCAB)


@pytest.mark.parametrize(
    ("settings", "param"),
    [
        ({"model": "/nowhere"}, "model"),
        ({"dtype": "int3"}, "dtype"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": True}, "block_size"),
        ({"threads": -1}, "threads"),
        ({"latency_goal": float("nan")}, "latency_goal"),
        ({"token_budget": 4, "max_running": 8}, "token_budget"),
    ],
)
def test_a_wrong_setting_names_field_value_and_remedy(
    tmp_path: Path, settings: dict[str, Any], param: str
) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(ConfigError) as raised:
        EngineConfig(**{"model": str(tmp_path), **settings})
    assert raised.value.param == param
    assert f"{param}={settings[param]!r}: " in raised.value.message
