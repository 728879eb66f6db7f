"""Default configs of every family of transformers, and those of public models, pass the check of their numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from motet_models.checkpoints.numbers import faults
from support.families import language_families as families
from support.peers.public_models import KNOWN


def as_file(config: Any) -> Any:
    """The contents of the config.json that transformers writes, with all defaults."""
    return json.loads(config.to_json_string(use_diff=False))


def test_defaults_of_transformers_are_let_through() -> None:
    found, looked = {}, 0
    for name in CONFIG_MAPPING:
        try:
            config = as_file(CONFIG_MAPPING[name]())
        except Exception:  # needs arguments, or a library that is not installed
            continue
        looked += 1
        if wrong := list(faults(config)):
            found[name] = wrong
    assert not found
    assert looked > 500


@pytest.mark.parametrize("name", sorted(families.causal_classes()))
def test_families_that_are_served_are_let_through(name: str) -> None:
    assert not list(faults(as_file(families.tiny_config(name))))


@pytest.mark.parametrize("name", KNOWN)
def test_public_models_are_let_through(name: str) -> None:
    assert not list(faults(KNOWN[name][3]))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["num_layers", "rope_theta", "a", "1"]), inner)
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_json_gets_an_answer(config: Any) -> None:
    for fault in faults(config):
        assert (len(fault) < 1000 and "give" in fault) or "repair" in fault


def test_deep_nesting_is_refused() -> None:
    config: dict[str, Any] = {}
    for _ in range(100):
        config = {"a": config}
    assert len(list(faults(config))) == 1
