"""Scores of rankers against those of sentence-transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import CrossEncoder as Reference
from sentence_transformers import MultiVectorEncoder, SentenceTransformer

from motet_embedding.config import EngineConfig
from motet_embedding.rankers import Ranker, load_ranker
from motet_embedding.service import load_embedder
from motet_shared.errors import ConfigError, ContextTooLong
from support.checkpoints.embedding_checkpoints import sentence_transformer
from support.checkpoints.ranking_checkpoints import (
    FAMILIES,
    cross_encoder,
    language_model,
    pylate,
    stanford_colbert,
)
from support.running.refusals import refuses

QUERY = "ba be di"
DOCUMENTS = ["ba be", "go ga . ma mi, mo", "a b c d e f g h i j k", "ba be di", "no yes sa"]


def load(path: Path, **settings: object) -> Ranker:
    return load_ranker(EngineConfig(model=str(path), **settings))  # type: ignore[arg-type]


def scores(ranker: Ranker, queries: list[str], documents: list[str], most: int = 0) -> list[float]:
    ranking = ranker.read(queries, documents, 0, most)
    rows = ranker.model.encode(ranking.texts).numpy()
    ends = np.cumsum([text.vectors for text in ranking.texts])
    return ranking.score(np.split(rows, ends[:-1]))


@pytest.mark.long(after=1)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cross_encoder_scores_as_sentence_transformers_does(family: str, tmp_path: Path) -> None:
    path = cross_encoder(tmp_path, family)
    due = Reference(str(path)).predict([(QUERY, text) for text in DOCUMENTS])
    ranker = load(path)
    assert ranker.model.packed
    found = scores(ranker, [QUERY], DOCUMENTS)
    np.testing.assert_allclose(found, due, atol=1e-4)
    assert np.ptp(due) > 1e-2, "the documents must differ for this to mean anything"
    alone = [scores(ranker, [QUERY], [text])[0] for text in DOCUMENTS]
    np.testing.assert_allclose(alone, found, atol=1e-5)


def test_the_folder_says_what_becomes_of_a_logit(tmp_path: Path) -> None:
    plain = cross_encoder(tmp_path / "plain")
    identity = "torch.nn.modules.linear.Identity"
    new = {"sentence_transformers": {"activation_fn": identity}}
    old = {"sbert_ce_default_activation_function": identity}
    due = Reference(str(plain), activation_fn=None).predict([(QUERY, DOCUMENTS[1])])
    for name, said in (("new", new), ("old", old)):
        [logit] = scores(load(cross_encoder(tmp_path / name, **said)), [QUERY], DOCUMENTS[1:2])
        np.testing.assert_allclose(1 / (1 + np.exp(-logit)), due[0], atol=1e-5)
    saved = tmp_path / "saved"
    Reference(str(plain)).save_pretrained(str(saved))
    np.testing.assert_allclose(scores(load(saved), [QUERY], DOCUMENTS[1:2]), due, atol=1e-5)
    with refuses(ConfigError, "model"):
        load(cross_encoder(tmp_path / "bad", sbert_ce_default_activation_function="own.Thing"))


def test_a_language_model_scores_by_yes_and_no(tmp_path: Path) -> None:
    path = language_model(tmp_path / "plain")
    reference = Reference(str(path))
    due = reference.predict([(QUERY, text) for text in DOCUMENTS])
    np.testing.assert_allclose(scores(load(path), [QUERY], DOCUMENTS), due, atol=1e-4)
    assert np.ptp(due) > 1e-3
    saved = tmp_path / "saved"
    reference.save_pretrained(str(saved))  # with a module that names the two tokens
    np.testing.assert_allclose(scores(load(saved), [QUERY], DOCUMENTS), due, atol=1e-4)


def test_without_roles_for_a_pair_qwen3s_format_is_used_where_it_fits(tmp_path: Path) -> None:
    found = scores(load(language_model(tmp_path, template=None)), [QUERY], DOCUMENTS)
    assert all(0 < score < 1 for score in found)
    assert len({round(score, 6) for score in found}) == len(DOCUMENTS)


@pytest.mark.long(after=1)
@pytest.mark.parametrize("expands", [True, False])
def test_late_interaction_as_sentence_transformers_computes_it(
    expands: bool, tmp_path: Path
) -> None:
    folders = {
        "pylate": pylate(tmp_path / "pylate", do_query_expansion=expands, query_length=12),
        "stanford": stanford_colbert(
            tmp_path / "stanford", query_maxlen=16, attend_to_mask_tokens=expands
        ),
    }
    folders["saved"] = tmp_path / "saved"
    MultiVectorEncoder(str(folders["pylate"])).save_pretrained(str(folders["saved"]))
    for name, path in folders.items():
        reference = MultiVectorEncoder(str(path))
        query, given = reference.encode_query([QUERY]), reference.encode_document(DOCUMENTS)
        due = reference.similarity(query, given)[0]
        found = scores(load(path), [QUERY], DOCUMENTS)
        np.testing.assert_allclose(found, due, atol=1e-4, err_msg=name)
        model = load_embedder(EngineConfig(model=str(path)))
        for task, vectors in (("query", query), ("document", given[1:2])):
            text = {"query": QUERY, "document": DOCUMENTS[1]}[task]
            rows = model.encode(model.texts.read([text], task))  # type: ignore[union-attr]
            np.testing.assert_allclose(rows, vectors[0], atol=1e-4, err_msg=f"{name}, {task}")


def test_an_embedding_model_ranks_by_the_cosine(tmp_path: Path) -> None:
    path = sentence_transformer(tmp_path, prompts={"query": "query: "}, normalize=False)
    reference = SentenceTransformer(str(path))
    due = reference.similarity(
        reference.encode_query(["ba be"]), reference.encode_document(["go ga", "ba be b"])
    )[0]
    found = scores(load(path), ["ba be"], ["go ga", "ba be b"])
    np.testing.assert_allclose(found, due, atol=1e-4)


def test_one_to_one_and_documents_that_are_cut(tmp_path: Path) -> None:
    for path in (cross_encoder(tmp_path / "pairs"), sentence_transformer(tmp_path / "vectors")):
        ranker = load(path)
        queries = ["ba", "be di", "ba"]
        found = scores(ranker, queries, ["a b", "c", "d e"])
        for index, (query, text) in enumerate(zip(queries, ["a b", "c", "d e"], strict=True)):
            np.testing.assert_allclose(scores(ranker, [query], [text])[0], found[index], atol=1e-5)
        long = " ".join(["ba"] * 200)
        with refuses(ContextTooLong, "documents[1]"):
            scores(ranker, ["ba"], ["a", long])
        cut = scores(ranker, ["ba"], [long, "ba ba ba"], 3)
        np.testing.assert_allclose(cut[0], cut[1], atol=1e-6)


def test_what_cannot_rank_or_embed_says_why(tmp_path: Path) -> None:
    pairs = cross_encoder(tmp_path / "pairs")
    with refuses(ConfigError, "model") as caught:
        load_embedder(EngineConfig(model=str(pairs)))
    assert "--rank" in str(caught.value)
    labels = cross_encoder(tmp_path / "labels", id2label={"0": "a", "1": "b"})
    with refuses(ConfigError, "model"):
        load(labels)
    wordless = language_model(tmp_path / "wordless", template="{{ messages[0].content }}")
    path = wordless / "tokenizer.json"
    path.write_text(path.read_text().replace("<|im_start|>", "<|turn|>"))
    with refuses(ConfigError, "model"):
        load(wordless)
