"""Encode each token of a text as a vector of its own, for late interaction (ColBERT).

Reads folders of sentence-transformers' MultiVectorEncoder, of PyLate, and of Stanford's ColBERT
(`HF_ColBERT`). B texts · N tokens · V numbers of a vector.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoModel

from motet_shared.errors import BadRequest, ConfigError, ContextTooLong

from .backbone import UNUSABLE, Backbone, load_model
from .config import EngineConfig
from .encoder import dense, prepare
from .folder import Folder, read_json
from .texts import Text, read_tokenizer, special_tokens

_MARKERS = {"query": "[unused0]", "document": "[unused1]"}  # Stanford's defaults
_QUERY_LENGTH = 32  # tokens to which queries are extended by default
_AFTER = {"Dense", "MultiVectorMask", "Normalize"}  # modules that are served behind Transformer


@dataclass(frozen=True, kw_only=True)
class LateInteraction:
    """Configure how queries and documents become tokens.

    prompts: text before the input, by task.
    markers: prompt tokens to keep whole, which the tokenizer would otherwise split.
    expand: length to which queries are padded with `expansion`; 0: no padding.
    attended: other tokens attend to the padding.
    fixed: longer queries are cut to `expand`.
    skipped: words whose tokens get no vector, in the tasks of `skipping`.
    lengths: maximum number of tokens, by task.
    """

    prompts: dict[str, str]
    markers: tuple[str, ...] = ()
    expand: int = 0
    expansion: str | None = None
    attended: bool = False
    fixed: bool = True
    skipped: tuple[str, ...] = ()
    skipping: tuple[str, ...] = ("document",)
    lengths: dict[str, int]

    @classmethod
    def read(cls, folder: Folder) -> LateInteraction:
        """Read a folder's settings. Raises ConfigError for what is not supported."""
        if folder.architecture == "HF_ColBERT":
            return _stanford(folder)
        if "MultiVectorMask" in dict(folder.modules):
            return _sentence_transformers(folder)
        return _pylate(folder)


def _stanford(folder: Folder) -> LateInteraction:
    said = read_json(folder.root / "artifact.metadata") or {}
    markers = {
        "query": said.get("query_token_id") or _MARKERS["query"],
        "document": said.get("doc_token_id") or _MARKERS["document"],
    }
    return LateInteraction(
        prompts={task: f"{marker} " for task, marker in markers.items()},
        markers=tuple(markers.values()),
        expand=said.get("query_maxlen") or _QUERY_LENGTH,
        attended=bool(said.get("attend_to_mask_tokens")),
        skipped=tuple(string.punctuation) if said.get("mask_punctuation", True) else (),
        lengths=_lengths(said.get("doc_maxlen")),
    )


def _pylate(folder: Folder) -> LateInteraction:
    said = folder.settings
    before = {task: said.get(f"{task}_prefix") or "" for task in ("query", "document")}
    prompts = {
        task: marker + folder.prompts.get(task, "").removeprefix(marker)
        for task, marker in before.items()
    }
    words = said.get("skiplist_words")
    expands = said.get("do_query_expansion") is not False
    return LateInteraction(
        prompts=prompts,
        markers=tuple(filter(None, before.values())),
        expand=(said.get("query_length") or _QUERY_LENGTH) if expands else 0,
        attended=bool(said.get("attend_to_expansion_tokens", said.get("attend_to_mask_tokens"))),
        skipped=tuple(string.punctuation if words is None else words),
        lengths=_lengths(
            said.get("document_length"), None if expands else said.get("query_length")
        ),
    )


def _sentence_transformers(folder: Folder) -> LateInteraction:
    said = read_json(folder.transformer / "sentence_bert_config.json") or {}
    mask = read_json(dict(folder.modules)["MultiVectorMask"] / "config.json") or {}
    if mask.get("keep_only_token_ids"):
        raise ConfigError(
            f"model={str(folder.root)!r}: keep_only_token_ids of its MultiVectorMask is not "
            "supported; give a model of texts"
        )
    expansion = said.get("query_expansion") or {}
    return LateInteraction(
        prompts={task: folder.prompts.get(task, "") for task in ("query", "document")},
        expand=expansion.get("length") or 0,
        expansion=expansion.get("token"),
        attended=bool(expansion.get("attend")),
        fixed=expansion.get("strategy", "fixed") == "fixed",
        skipped=tuple(mask.get("skiplist_words") or ()),
        skipping=tuple(mask.get("skiplist_tasks") or ("document",)),
        lengths=_lengths(said.get("document_length"), said.get("query_length")),
    )


def _lengths(document: Any, query: Any = None) -> dict[str, int]:
    found = {"document": document, "query": query}
    return {task: length for task, length in found.items() if isinstance(length, int)}


class TokenTexts:
    """Tokenize queries and documents for late interaction."""

    def __init__(self, folder: Folder, described: LateInteraction, limit: int):
        self._described, self._lower = described, folder.lower
        self._tokenizer = read_tokenizer(folder.transformer)
        _add_markers(self._tokenizer, described.markers)
        self._expansion = _expansion(folder, described, self._tokenizer) if described.expand else 0
        words = map(self._tokenizer.token_to_id, described.skipped)
        self._skipped = {token for token in words if token is not None} - _unknown(folder)
        longest = {task: min(described.lengths.get(task, limit), limit) for task in _MARKERS}
        if described.expand:
            longest["query"] = min(described.expand, limit) if described.fixed else limit
        self.longest = longest

    def read(
        self, given: Sequence[str | list[int]], prompt: str = "", first: int = 0
    ) -> list[Text]:
        """Return the tokens of texts to be embedded as documents, or as `prompt` says.

        `prompt`: `query` or `document`. `first`: index of the first text within its request.
        Raises BadRequest for another prompt, for token ids and for an empty text, ContextTooLong.
        """
        if prompt and prompt not in _MARKERS:
            raise BadRequest(
                f"prompt_name: {prompt!r} is no prompt of this model; there are: query, document",
                param="prompt_name",
            )
        texts = [text for text in given if isinstance(text, str) and text]
        if len(texts) < len(given):
            raise BadRequest(
                "input: has token ids or an empty text; give texts, to which this model adds "
                "tokens of its own",
                param="input",
            )
        return self.encode(texts, prompt or "document", first, param="input")

    def encode(
        self, given: Sequence[str], task: str, first: int = 0, *, param: str = ""
    ) -> list[Text]:
        """Return the tokens of texts of a task: `query` or `document`.

        Raises ContextTooLong, with `first` as the index of the first text.
        """
        whole = [self._described.prompts[task] + text for text in given]
        whole = [text.lower() for text in whole] if self._lower else whole
        found = [one.ids for one in self._tokenizer.encode_batch_fast(whole)]
        for index, ids in enumerate(found):
            if len(ids) > self.longest[task]:
                document = f"documents[{first + index}]"
                where = param or ("query" if task == "query" else document)
                raise ContextTooLong(
                    f"`{where}` has {len(ids)} tokens, this model takes at most "
                    f"{self.longest[task]} in a {task}; shorten it",
                    param=where,
                )
        return [self._text(ids, task) for ids in found]

    def _text(self, ids: list[int], task: str) -> Text:
        skipped = self._skipped if task in self._described.skipping else set()
        kept = [place for place, token in enumerate(ids) if token not in skipped]
        more = max(0, self._described.expand - len(ids)) if task == "query" else 0
        return Text(
            [*ids, *[self._expansion] * more],
            unseen=0 if self._described.attended else more,
            kept=[*kept, *range(len(ids), len(ids) + more)],
        )


def _add_markers(tokenizer: Tokenizer, markers: Sequence[str]) -> None:
    """Keep markers whole that the tokenizer knows and would split."""
    for marker in markers:
        for name in (marker, marker.split()[0] if marker.split() else marker):
            if tokenizer.token_to_id(name) is None:
                continue
            if tokenizer.encode(name, add_special_tokens=False).tokens != [name]:
                tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True)])
            break


def _unknown(folder: Folder) -> set[int]:
    tokenizer = read_tokenizer(folder.transformer)
    found = tokenizer.token_to_id(special_tokens(folder.transformer).get("unk_token", ""))
    return set() if found is None else {found}


def _expansion(folder: Folder, described: LateInteraction, tokenizer: Tokenizer) -> int:
    names = special_tokens(folder.transformer)
    name = described.expansion or names.get("mask_token") or names.get("eos_token") or "[MASK]"
    if (found := tokenizer.token_to_id(name)) is None:
        raise ConfigError(
            f"model={str(folder.root)!r}: {name!r}, which extends queries, is no token of its "
            "tokenizer; name one as mask_token in tokenizer_config.json"
        )
    return int(found)


class TokenEncoder:
    """Compute a vector of each token that counts, of unit length."""

    def __init__(self, backbone: Backbone, layers: nn.Module, folder: Folder):
        self._backbone, self._layers = backbone, layers
        self.folder = folder
        self.packed = backbone.packed
        self.limit, self.vocabulary = backbone.limit, backbone.vocabulary
        self.texts = TokenTexts(folder, LateInteraction.read(folder), self.limit)
        self.size = self.encode([Text([0], kept=[0])]).shape[1]

    @classmethod
    def load(cls, folder: Folder, config: EngineConfig) -> TokenEncoder:
        """Load a checkpoint: safetensors only, no code from the folder. Raises ConfigError."""
        device = prepare(folder, config)
        kinds = [kind for kind, _ in folder.modules if kind != "Transformer"]
        if unknown := [kind for kind in kinds if kind not in _AFTER]:
            raise ConfigError(
                f"model={config.model!r}: modules.json has a {unknown[0]}, which is not supported; "
                f"there are Transformer, {', '.join(sorted(_AFTER))}"
            )
        model = load_model(AutoModel, folder.transformer, config.dtype, device, unused="pooler.")
        layers = [dense(path) for path in folder.dense] if folder.dense else [_projection(folder)]
        return cls(Backbone(model, folder, config), nn.Sequential(*layers).to(model.device), folder)

    def describe(self) -> dict[str, str]:
        """Return what was chosen when the model was loaded."""
        return self._backbone.describe()

    @torch.inference_mode()
    def encode(self, texts: Sequence[Text]) -> Tensor:
        """Return `[R, V]` float32: the vectors of each text's tokens that count, in order."""
        hidden = self._backbone.hidden(texts)
        rows = [
            one if text.kept is None else one[torch.tensor(text.kept, device=one.device)]
            for one, text in zip(hidden, texts, strict=True)
        ]
        return functional.normalize(self._layers(torch.cat(rows).float()), dim=-1)


def _projection(folder: Folder) -> nn.Module:
    """Return the projection of Stanford's ColBERT, which lies beside the transformer's weights."""
    path = folder.root / "model.safetensors"
    try:
        weight = load_file(path)["linear.weight"].float()
    except UNUSABLE as error:
        raise ConfigError(
            f"model={str(folder.root)!r}: no linear.weight in model.safetensors, which projects "
            "tokens; give a complete ColBERT folder"
        ) from error
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.load_state_dict({"weight": weight})
    return layer.requires_grad_(False)
