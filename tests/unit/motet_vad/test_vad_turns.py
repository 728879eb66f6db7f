"""The end-of-turn model: the recipe learns it, the service judges with it, the pipeline makes patience of it."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_pipelines.voice.end_of_turn import (
    LONGEST_MS,
    SHORTEST_MS,
    UNSURE,
    end_pause_ms,
    end_probability,
)
from motet_shared.errors import BadRequest, ConfigError, UnknownModel
from motet_shared.messages import PredictTurnEnd
from motet_shared.testing import memory_buses, running
from motet_shared.wire.bus import Bus
from motet_vad.config import VadConfig
from motet_vad.service import Vad
from motet_vad.turns import SLOTS, TurnModel, TurnShape, features, slots, words_of
from recipes.speech.sentences import is_held_out
from recipes.turns import train as pocket_turns
from support.running.refusals import refuses

FOLDER = Path(__file__).parents[3] / "models" / "pocket-turns"
SMALL = pocket_turns.Recipe(sentences=2500, epochs=3, long_share=0.0)


@pytest.fixture(scope="module")
def model() -> TurnModel:
    return TurnModel.load(str(FOLDER))


@pytest.fixture
async def bus() -> AsyncIterator[Bus]:
    config = VadConfig(metrics_port=-1, turns=str(FOLDER))
    async with memory_buses("gateway", "vad") as (gateway, worker), running(Vad(config, worker)):
        yield gateway


def test_the_committed_model_tells_ends_from_breaks_on_sentences_that_it_never_saw(
    model: TurnModel,
) -> None:
    scores = pocket_turns.evaluate(model, draws=2000)
    assert scores["all"].auc > 0.85
    assert scores["all"].accuracy > 0.75
    for category in ("question", "instruction", "general"):
        assert scores[category].auc > 0.8, category


@pytest.mark.parametrize(
    ("whole", "broken"),
    [
        ("Where is the red circle?", "Where is the"),
        ("What is three plus four?", "What is three plus"),
        ("She lives in London.", "She lives in"),
        ("I want a very small house.", "I want a very"),
        ("Remove the green star.", "Remove the um"),
        ("Yes.", "Because"),
    ],
)
def test_plain_cases_are_clear(model: TurnModel, whole: str, broken: str) -> None:
    assert model.end_probability(whole) > 0.5 > model.end_probability(broken)


def test_what_a_recognizer_guesses_of_case_and_punctuation_changes_nothing(
    model: TurnModel,
) -> None:
    assert model.end_probability("Where is the star?") == model.end_probability(
        "where is  the STAR"
    )
    assert model.end_probability("") == model.end_probability(" ...") == UNSURE


def test_the_slots_are_the_last_words_the_first_ones_and_an_ending() -> None:
    assert words_of("Don't stop, it's 3 o'clock!") == ["don't", "stop", "it's", "3", "o'clock"]
    assert slots("a b c d e f walking".split()) == [
        "walking",
        "f",
        "e",
        "d",
        "c",
        "b",
        "a",
        "b",
        "-ng",
    ]
    assert slots(["hi"]) == ["hi", *[""] * 5, "hi", "", "-hi"]
    rows, length = features("hi", 64)
    assert rows.shape == (SLOTS, 2)
    assert (rows[1:6] == 0).all()
    assert length == 1 / 12


@given(st.text(max_size=80))
def test_any_text_has_a_probability(text: str) -> None:
    rng = np.random.default_rng(0)
    shape = TurnShape(rows=16, width=2, hidden=4)
    weights = {
        name: rng.normal(0, 1, size).astype(np.float32) for name, size in shape.tensors().items()
    }
    assert 0 <= TurnModel(shape, weights, "random").end_probability(text) <= 1


def test_training_uses_no_held_out_sentence_and_learns_again_what_it_learned(
    tmp_path: Path,
) -> None:
    made = pocket_turns.examples(SMALL)
    assert made == pocket_turns.examples(SMALL)
    assert 0.5 < sum(example.finished for example in made) / len(made) < 0.55
    spoken = [
        example.text
        for example in made
        if example.finished and example.text not in pocket_turns.SHORT
    ]
    assert not any(is_held_out(text) for text in spoken)
    trained = pocket_turns.train(SMALL)
    trained.save(tmp_path / "again")
    loaded = TurnModel.load(str(tmp_path / "again"))
    text = "where is the red"
    assert loaded.end_probability(text) == pytest.approx(
        trained.end_probability(text), abs=0.01
    )  # float16
    scores = pocket_turns.evaluate(loaded, draws=1000)
    assert scores["all"].auc > 0.75, "even a few sentences teach most of it"


def test_the_network_of_the_recipe_is_that_of_the_service() -> None:
    import torch

    shape = TurnShape(rows=64, width=4, hidden=8)
    network = pocket_turns.Network(shape)
    exported = network.export(shape)
    for text in ("one", "where is the red circle", "a b c d e f g h i j k l m n o"):
        rows, length = features(text, shape.rows)
        with torch.no_grad():
            score = network(
                torch.from_numpy(rows)[None], torch.tensor([length], dtype=torch.float32)
            )
        assert exported.end_probability(text) == pytest.approx(
            float(torch.sigmoid(score)), abs=1e-5
        )


def test_scores_are_what_they_say() -> None:
    assert pocket_turns.score([0.9, 0.8], [0.1, 0.2, 0.7]) == (1.0, pytest.approx(5 / 6), 3, 2)
    assert pocket_turns.score([0.4, 0.6], [0.5, 0.3]).auc == 0.75


@pytest.mark.parametrize(
    ("file", "content", "named"),
    [
        ("config.json", "{", "config.json"),
        ("config.json", '{"model_type": "llama"}', "model_type"),
        ("config.json", '{"model_type": "motet-turns", "depth": 3}', "depth"),
        ("config.json", '{"model_type": "motet-turns", "rows": 8}', "config.json"),
        ("model.safetensors", "short", "model.safetensors"),
    ],
)
def test_a_folder_that_is_damaged_is_named(
    model: TurnModel, file: str, content: str, named: str, tmp_path: Path
) -> None:
    model.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "motet-turns"
    (tmp_path / file).write_text(content)
    with pytest.raises(ConfigError, match=named) as caught:
        TurnModel.load(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


# -------------------------------------------------------------------------------------------------------- the pipeline
async def test_the_service_judges_and_the_pipeline_asks(bus: Bus, model: TurnModel) -> None:
    for text in ("where is the", "where is the red circle"):
        assert await end_probability(bus, text, deadline=30) == pytest.approx(
            model.end_probability(text)
        )
    with refuses(UnknownModel, "model"):
        [body async for body in bus.open("vad", PredictTurnEnd(text="x", model="other"))]


async def test_without_a_judge_silence_decides() -> None:
    async with memory_buses("gateway", "vad") as (gateway, worker):
        assert await end_probability(gateway, "where is the") == UNSURE
        async with running(Vad(VadConfig(metrics_port=-1), worker)):
            assert await end_probability(gateway, "where is the", deadline=30) == UNSURE


@given(st.floats(0, 1), st.floats(0, 1), st.sampled_from(sorted(LONGEST_MS)))
def test_patience_falls_with_certainty_and_stays_within_its_bounds(
    one: float, other: float, eagerness: str
) -> None:
    low, high = sorted((one, other))
    assert SHORTEST_MS[eagerness] <= end_pause_ms(high, eagerness) <= end_pause_ms(low, eagerness)
    assert end_pause_ms(0.0, eagerness) == LONGEST_MS[eagerness]
    assert end_pause_ms(1.0, eagerness) == SHORTEST_MS[eagerness]


def test_eagerness_is_that_of_the_api() -> None:
    assert [end_pause_ms(0, name) for name in ("low", "medium", "auto", "high")] == [
        8000,
        4000,
        4000,
        2000,
    ]
    assert end_pause_ms(0.5, "low") > end_pause_ms(0.5, "auto") > end_pause_ms(0.5, "high")
    with refuses(BadRequest, "eagerness"):
        end_pause_ms(0.5, "keen")
