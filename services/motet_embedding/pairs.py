"""Tokenize pairs of a query and a document for models that read both at once.

Needs no torch; thread-safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from motet_shared.errors import BadRequest, ConfigError, ContextTooLong

from .folder import Folder, read_json
from .texts import Text, read_tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# Qwen3-Reranker's format (its model card): its own chat template has no roles for a pair.
_QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_QWEN3_MARK = "<|im_start|>"
_QUERY, _DOCUMENT = "\ue000query\ue001", "\ue000document\ue001"  # stand for the texts in a template


def cut(tokenizer: Tokenizer, text: str, most: int) -> str:
    """Return the beginning of a text that has at most `most` tokens, without special ones."""
    found = tokenizer.encode(text, add_special_tokens=False)
    return text if len(found.ids) <= most else text[: found.offsets[most - 1][1]]


class PairTexts(Protocol):
    """Make one text of a query and a document."""

    tokenizer: Tokenizer

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[Text]:
        """Return the tokens of each pair."""
        ...


class SegmentPairs:
    """Join a query and a document as the tokenizer's own template for pairs does.

    types: whether the model tells them apart by token types.
    """

    def __init__(self, folder: Folder, *, types: bool):
        self.tokenizer = read_tokenizer(folder.transformer)
        settings = read_json(folder.transformer / "tokenizer_config.json") or {}
        names = settings.get("model_input_names") or ["token_type_ids"]
        self._types = types and "token_type_ids" in names
        self._lower = folder.lower

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[Text]:
        """Return the tokens of each pair."""
        given = [(q.lower(), d.lower()) for q, d in pairs] if self._lower else list(pairs)
        return [
            Text(one.ids, types=one.type_ids if self._types else None)
            for one in self.tokenizer.encode_batch_fast(given)
        ]


@dataclass(frozen=True, slots=True)
class _Template:
    """Hold a rendered template as what is before, between and after a query and a document."""

    before: str
    between: str
    after: str


class TemplatePairs:
    """Put a query and a document into a template that asks whether they fit.

    The template is the folder's chat template, if it renders messages of the roles `query` and
    `document`, as sentence-transformers saves rerankers, else that of Qwen3-Reranker. It is
    rendered once, when the folder is loaded.
    """

    def __init__(self, folder: Folder):
        self.tokenizer = read_tokenizer(folder.transformer)
        self._template = _template(folder, self.tokenizer)

    def encode(self, pairs: Sequence[tuple[str, str]]) -> list[Text]:
        """Return the tokens of each pair."""
        parts = self._template
        whole = [f"{parts.before}{q}{parts.between}{d}{parts.after}" for q, d in pairs]
        found = self.tokenizer.encode_batch_fast(whole, add_special_tokens=False)
        return [Text(one.ids) for one in found]


class Pairs:
    """Tokenize pairs and validate them.

    limit: most tokens of a pair.
    """

    def __init__(self, texts: PairTexts, limit: int):
        self._texts, self._limit = texts, limit

    def read(
        self, queries: Sequence[str], documents: Sequence[str], first: int = 0, most: int = 0
    ) -> list[Text]:
        """Return the tokens of each document with its query, or with the only query.

        `first`: index of the first document within its request. `most`: documents are cut to so
        many tokens; 0: not cut. Raises ContextTooLong for a pair above the limit.
        """
        if most:
            documents = [cut(self._texts.tokenizer, one, most) for one in documents]
        whole = list(queries) if len(queries) == len(documents) else [*queries] * len(documents)
        texts = self._texts.encode(list(zip(whole, documents, strict=True)))
        for index, text in enumerate(texts):
            check_length(text, self._limit, first + index)
        return texts


def check_query(text: Text, limit: int) -> None:
    """Raise ContextTooLong for a query that cannot be encoded."""
    if len(text) > limit:
        raise ContextTooLong(
            f"`query` has {len(text)} tokens, this model takes at most {limit}; shorten it",
            param="query",
        )


def check_length(text: Text, limit: int, index: int) -> None:
    """Raise ContextTooLong or BadRequest for a document that cannot be scored."""
    if len(text) > limit:
        raise ContextTooLong(
            f"`documents[{index}]` has {len(text)} tokens with its query, this model takes at most "
            f"{limit}; shorten it, or give max_tokens_per_doc",
            param=f"documents[{index}]",
        )
    if not len(text):
        raise BadRequest(
            f"`documents[{index}]` has no tokens; leave it out", param=f"documents[{index}]"
        )


def _template(folder: Folder, tokenizer: Tokenizer) -> _Template:
    instruction = folder.prompts.get(folder.default_prompt, "")
    own = _render(folder, instruction)
    if own is None and tokenizer.token_to_id(_QWEN3_MARK) is not None:
        own = _QWEN3.format(
            instruction=instruction or INSTRUCTION, query=_QUERY, document=_DOCUMENT
        )
    if own is None:
        raise ConfigError(
            f"model={str(folder.root)!r}: its chat template has no roles query and document; add a "
            "chat_template.jinja that renders messages of these roles, or give a cross-encoder"
        )
    before, _, rest = own.partition(_QUERY)
    between, _, after = rest.partition(_DOCUMENT)
    return _Template(before, between, after)


def _render(folder: Folder, instruction: str) -> str | None:
    """Return a pair in the folder's chat template, if it has roles for both, query first."""
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            folder.transformer, local_files_only=True
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        first = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"model={str(folder.transformer)!r}: the tokenizer cannot be read: {first}"
        ) from error
    if not tokenizer.chat_template:
        return None
    for content in (str, _parts):
        messages = [{"role": "system", "content": content(instruction)}] if instruction else []
        messages += [
            {"role": "query", "content": content(_QUERY)},
            {"role": "document", "content": content(_DOCUMENT)},
        ]
        if (found := _rendered(tokenizer, messages)) is not None:
            return found
    return None


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _rendered(tokenizer: Any, messages: list[dict[str, Any]]) -> str | None:
    try:
        found = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # templates raise errors of their own for roles that they do not have
        return None
    once = found.count(_QUERY) == found.count(_DOCUMENT) == 1
    return found if once and found.index(_QUERY) < found.index(_DOCUMENT) else None
