"""Test the pocket-embed recipe at a small size: triplets, training, the exported folder."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from random import Random

import torch
from transformers import AutoModel, AutoTokenizer

from recipes.embed.data import (
    Triplet,
    alter_scene,
    held_out,
    paraphrase_scene,
    paraphrase_sentence,
    replace_word,
    triplet,
)
from recipes.embed.evaluate import Embedder, retrieval
from recipes.embed.train import Recipe, Trainer, contrastive_loss, vectors
from recipes.training.errors import RecipeError
from recipes.training.held_out_seeds import HELD_OUT_SEEDS
from recipes.world.scenes import Scene, Thing, sample_scene

TINY = Recipe(
    width=32,
    layers=2,
    heads=4,
    inner=48,
    vocabulary=600,
    tokenizer_triplets=60,
    batch=8,
    steps=30,
    warmup=4,
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embed")
    trainer = Trainer(TINY)
    reports = trainer.run(folder / "state" / "state.pt")
    assert sum(report.loss for report in reports[-5:]) < 0.9 * sum(
        report.loss for report in reports[:5]
    )
    trainer.export(folder / "model")
    return folder / "model"


def test_cases_are_functions_of_seed_and_index() -> None:
    triplets = [triplet(50, index) for index in range(40)]
    assert triplets == [triplet(50, index) for index in range(40)]
    assert {one.kind for one in triplets} == {"world", "general"}
    assert all(one.anchor != one.negative for one in triplets)
    assert sum(one.anchor != one.positive for one in triplets) > 36
    with pytest.raises(RecipeError) as refused:
        triplet(HELD_OUT_SEEDS.start, 0)
    assert refused.value.param == "seed"


def test_held_out_cases_are_none_of_those() -> None:
    for kind in ("world", "general"):
        kept = list(held_out(kind, 20))
        assert {one.kind for one in kept} == {kind}
        assert len({one.anchor for one in kept}) == 20
        assert kept[:3] == list(held_out(kind, 3))


def test_a_scene_that_is_altered_reads_differently() -> None:
    for seed in range(60):
        rng = Random(seed)
        scene = sample_scene(rng, min_things=2)
        assert alter_scene(scene, rng) != scene
    red, blue = Thing(shape="star", colour="red"), Thing(shape="circle", colour="blue", column=2)
    row = Scene(things=(red, blue))
    texts = {paraphrase_scene(row, Random(seed)).lower().rstrip(".") for seed in range(80)}
    assert {
        "from right to left: a blue circle and a red star",
        "a red star is left of a blue circle",
    } <= texts
    assert not any(text.startswith("from right to left: a red") for text in texts)


def test_general_sentences_are_paraphrased() -> None:
    texts = {
        paraphrase_sentence("She did not begin because we have four apples.", Random(seed)).lower()
        for seed in range(200)
    }
    assert "because we have four apples, she didn't start." in texts
    assert any("4 apples" in text for text in texts)
    assert replace_word("So it is.", Random(1)) is None
    changed = replace_word("The apple is green.", Random(1))
    assert changed is not None
    assert changed != "The apple is green."


def test_the_loss_prefers_the_positive() -> None:
    same = torch.nn.functional.normalize(
        torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
    )
    good, right = contrastive_loss(same, same, -same, 0.05)
    bad, wrong = contrastive_loss(same, -same, same, 0.05)
    assert (float(right), float(wrong)) == (1.0, 0.0)
    assert float(good) < 0.1 < float(bad)


def test_the_real_size_is_within_its_bounds() -> None:
    trainer = Trainer(replace(Recipe(), tokenizer_triplets=200))
    assert sum(parameter.numel() for parameter in trainer.model.parameters()) <= 3_000_000
    assert len(trainer.tokenizer) <= Recipe.vocabulary
    texts = [triplet(50, index).anchor for index in range(50)]
    read = trainer.tokenizer(texts).input_ids
    assert not any(trainer.tokenizer.unk_token_id in ids for ids in read)
    assert max(map(len, read)) <= Recipe.context
    words = sum(len(text.split()) for text in texts)
    assert sum(map(len, read)) < 2 * words, "most words are one token"


def test_a_run_that_is_resumed_takes_the_course_of_one_that_is_not(tmp_path: Path) -> None:
    undisturbed = Trainer(TINY, steps=6)
    due = [undisturbed.train_step(step) for step in undisturbed.batches()]
    first = Trainer(TINY, steps=6)
    seen = [first.train_step(step) for step in islice(first.batches(), 3)]
    first.save_state(tmp_path / "state.pt")
    resumed = Trainer(TINY, steps=6)
    resumed.load_state(tmp_path / "state.pt")
    seen += [resumed.train_step(step) for step in resumed.batches()]
    assert [one.loss for one in seen] == pytest.approx([one.loss for one in due], rel=1e-4)


def test_the_service_and_transformers_read_the_folder_alike(trained: Path) -> None:
    assert json.loads((trained / "config.json").read_text())["architectures"] == ["BertModel"]
    texts = [text for one in held_out("world", 3) for text in (one.anchor, one.positive)]
    model, tokenizer = (
        AutoModel.from_pretrained(trained, dtype=torch.float32),
        AutoTokenizer.from_pretrained(trained),
    )
    with torch.no_grad():
        due = vectors(model, tokenizer, texts)
    torch.testing.assert_close(Embedder(trained).vectors(texts), due, atol=1e-5, rtol=0)


def test_held_out_retrieval_is_measured(trained: Path) -> None:
    embedder = Embedder(trained)
    found = retrieval(embedder, "world", 12)
    assert 1 / 24 < found["first"] <= 1, "even a little training is better than chance"
    assert 0 <= found["near"] <= 1


def test_perfect_embeddings_score_one(monkeypatch: pytest.MonkeyPatch) -> None:
    triplets = [Triplet("world", f"a{n}", f"b{n}", f"c{n}") for n in range(5)]
    monkeypatch.setattr("recipes.embed.evaluate.held_out", lambda kind, count: triplets[:count])

    class Perfect:
        def vectors(self, texts: list[str]) -> torch.Tensor:
            return torch.stack(
                [torch.eye(10)[int(text[1:]) + 5 * (text[0] == "c")] for text in texts]
            )

    assert retrieval(Perfect(), "world", 5) == {"first": 1.0, "near": 1.0}  # type: ignore[arg-type]
