"""What generation_config.json recommends is used where a client says nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from motet_shared.errors import ConfigError
from motet_shared.messages import Sampling
from motet_tokenizer.encoding.vocabulary import Vocabulary
from motet_tokenizer.sampling_defaults import SamplingDefaults
from support.checkpoints.language_checkpoints import tiny_checkpoint

RECOMMENDED = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}


def test_left_out_fields_are_completed_and_given_ones_kept() -> None:
    defaults = SamplingDefaults.of(RECOMMENDED | {"do_sample": True, "eos_token_id": 5})
    given = Sampling(temperature=0.0, left_out=["top_p", "top_k", "min_p"], seed=7)
    completed = defaults.complete(given)
    assert (completed.temperature, completed.top_p, completed.top_k) == (0.0, 0.95, 20)
    assert (completed.min_p, completed.repetition_penalty, completed.seed) == (0.0, 1.0, 7)
    assert completed.left_out == []
    assert defaults.complete(Sampling(top_p=0.5)).top_p == 0.5


@pytest.mark.parametrize(
    ("config", "values"),
    [
        ({}, {}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_p": 0}, {"top_p": 1.0, "top_k": 1}),
        ({"temperature": None, "min_p": 0.05}, {"min_p": 0.05}),
    ],
)
def test_published_values_are_read(config: dict[str, Any], values: dict[str, float]) -> None:
    assert SamplingDefaults.of(config).values == values


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 1.5),
        ("min_p", float("nan")),
        ("repetition_penalty", 0),
        ("top_k", 2.5),
        ("max_new_tokens", 0),
    ],
)
def test_values_that_cannot_be_used_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as raised:
        SamplingDefaults.of({field: value})
    assert field in raised.value.message
    assert raised.value.param == "generation_config"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tiny_checkpoint("llama", tmp_path / "model")
    (folder / "generation_config.json").write_text(
        json.dumps(RECOMMENDED | {"eos_token_id": 258, "max_new_tokens": 9})
    )
    return folder


def test_a_checkpoint_brings_its_own(folder: Path) -> None:
    vocabulary = Vocabulary.load("tiny", str(folder))
    assert vocabulary.sampling == SamplingDefaults(RECOMMENDED, 9)
    assert vocabulary.card.sampling == RECOMMENDED


def test_none_turns_them_off_but_not_the_end_tokens(folder: Path) -> None:
    vocabulary = Vocabulary.load("tiny", str(folder), generation_config="none")
    assert vocabulary.sampling == SamplingDefaults()
    assert 258 in vocabulary.eos_ids


def test_another_file_may_be_given(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text('{"temperature": 0.1}')
    vocabulary = Vocabulary.load("tiny", str(folder), generation_config=str(tmp_path / "own.json"))
    assert vocabulary.sampling.values == {"temperature": 0.1}
