"""Rank documents for a query: by a score of each pair, or by the similarity of vectors.

A pair is read by the model at once (`pair_scores.py`). Vectors are computed of queries and documents
apart; a document scores by the most similar of its vectors to each vector of the query, summed
(MaxSim, ColBERT; arXiv:2004.12832). With one vector of a text that is their cosine similarity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from motet_shared.errors import ConfigError

from .config import EngineConfig
from .encoder import Encoder
from .engine import TextModel, Vectors
from .folder import Folder
from .late_interaction import TokenEncoder
from .pair_scores import CrossEncoder, TokenScorer
from .pairs import Pairs, SegmentPairs, TemplatePairs, check_length, check_query, cut
from .texts import Text, Texts

# Prompts of sentence-transformers' models for queries and for documents, the first that there is.
QUERY_PROMPTS, DOCUMENT_PROMPTS = ("query",), ("document", "passage", "corpus")


@dataclass(frozen=True, slots=True)
class Ranking:
    """Hold what must be computed to score documents, and how.

    texts: to be encoded. score: makes the scores of the vectors of these texts, in order.
    tokens: of the texts, a repeated query counted once.
    """

    texts: list[Text]
    score: Callable[[list[Vectors]], list[float]]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.texts))


class Ranker(Protocol):
    """Score documents against queries with one model.

    limit: most tokens of a pair, or of a text. vocabulary: token ids are below it.
    """

    model: TextModel
    limit: int
    vocabulary: int

    def read(
        self, queries: Sequence[str], documents: Sequence[str], first: int, most: int
    ) -> Ranking:
        """Return what to compute for each document with its query, or with the only query.

        `first`: index of the first document within its request. `most`: documents are cut to so
        many tokens; 0: not cut. Raises BadRequest or ContextTooLong that names the document.
        """
        ...


class PairRanker:
    """Rank by scores of pairs."""

    def __init__(self, model: CrossEncoder | TokenScorer, pairs: Pairs):
        self.model: TextModel = model
        self.limit, self.vocabulary = model.backbone.limit, model.backbone.vocabulary
        self._pairs = pairs

    def read(
        self, queries: Sequence[str], documents: Sequence[str], first: int, most: int
    ) -> Ranking:
        """Return one text of each pair, whose vector is its score."""
        texts = self._pairs.read(queries, documents, first, most)
        return Ranking(texts, lambda vectors: [float(one[0, 0]) for one in vectors])


class VectorRanker:
    """Rank by the similarity of vectors.

    unit: whether vectors are compared by their cosine, else by their product.
    """

    def __init__(self, model: Encoder | TokenEncoder, folder: Folder, *, unit: bool):
        self.model: TextModel = model
        self.limit, self.vocabulary = model.limit, model.vocabulary
        self._texts = Texts(folder, model.limit, model.vocabulary)
        self._query = _prompt(folder, QUERY_PROMPTS)
        self._document = _prompt(folder, DOCUMENT_PROMPTS)
        self._token_texts = model.texts if isinstance(model, TokenEncoder) else None
        self._unit = unit

    def read(
        self, queries: Sequence[str], documents: Sequence[str], first: int, most: int
    ) -> Ranking:
        """Return the queries, without repetitions, then the documents."""
        if most:
            documents = [cut(self._texts.tokenizer, one, most) for one in documents]
        different = list(dict.fromkeys(queries))
        whose = [different.index(query) for query in queries] if len(queries) > 1 else [0]
        whose = whose if len(queries) == len(documents) else whose * len(documents)
        asked = self._encode(different, self._query, "query", 0)
        texts = self._encode(documents, self._document, "document", first)
        for text in asked:
            check_query(text, self.limit)
        for index, text in enumerate(texts):
            check_length(text, self.limit, first + index)
        count, unit = len(asked), self._unit

        def score(vectors: list[Vectors]) -> list[float]:
            rows = [_unit(one) for one in vectors] if unit else vectors
            return [max_sim(rows[q], one) for q, one in zip(whose, rows[count:], strict=True)]

        return Ranking([*asked, *texts], score)

    def _encode(self, given: Sequence[str], prompt: str, task: str, first: int) -> list[Text]:
        if self._token_texts is not None:
            return self._token_texts.encode(given, task, first)
        return self._texts.encode(given, prompt)


def max_sim(query_QV: Vectors, document_DV: Vectors) -> float:
    """Return the sum, over the query's vectors, of the largest product with one of the document."""
    return float((query_QV @ document_DV.T).max(axis=1).sum())


def load_ranker(config: EngineConfig) -> Ranker:
    """Load a ranker of the kind that its folder says. Raises ConfigError.

    A plain language model is asked whether a document fits, with the logits of yes and no.
    """
    folder = Folder.read(config.model)
    if not folder.modules and folder.architecture.endswith("ForCausalLM"):
        folder = replace(folder, kind="token logits")
    if folder.kind == "pair scores":
        model = CrossEncoder.load(folder, config)
        segments = SegmentPairs(folder, types=model.backbone.has_types)
        return PairRanker(model, Pairs(segments, model.backbone.limit))
    if folder.kind == "token logits":
        template = TemplatePairs(folder)
        scorer = TokenScorer.load(folder, config, template.tokenizer)
        return PairRanker(scorer, Pairs(template, scorer.backbone.limit))
    if folder.kind == "picture vectors":
        raise ConfigError(
            f"model={config.model!r}: {folder.architecture} embeds texts and pictures and is no "
            "ranker; serve it with `motet up --embed FOLDER`"
        )
    similarity = folder.settings.get("similarity_fn_name") or "cosine"
    if folder.kind == "token vectors":
        return VectorRanker(TokenEncoder.load(folder, config), folder, unit=False)
    if similarity not in ("cosine", "dot"):
        raise ConfigError(
            f"model={config.model!r}: similarity_fn_name {similarity!r} is not supported; there are "
            "cosine and dot"
        )
    return VectorRanker(Encoder.load(config), folder, unit=similarity == "cosine")


def _prompt(folder: Folder, names: Sequence[str]) -> str:
    return next((name for name in names if name in folder.prompts), folder.default_prompt)


def _unit(vectors_RV: Vectors) -> Vectors:
    norms = np.linalg.norm(vectors_RV, axis=1, keepdims=True)
    found: Vectors = vectors_RV / np.maximum(norms, np.finfo(np.float32).tiny)
    return found
