"""Tokenize texts and validate them. Needs no torch; thread-safe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from motet_shared.errors import BadRequest, ConfigError, ContextTooLong

from .folder import Folder, read_json


@dataclass(frozen=True, slots=True)
class Text:
    """Hold the token ids of one text, special tokens included; the first `prompt` are a prompt's.

    types: token type of each token of a pair; None: all 0.
    unseen: how many last tokens no token attends to.
    kept: places of the tokens that have vectors of their own; None: the text has one vector.
    """

    ids: list[int]
    prompt: int = 0
    types: list[int] | None = None
    unseen: int = 0
    kept: list[int] | None = None

    @property
    def vectors(self) -> int:
        """Return the number of this text's vectors."""
        return 1 if self.kept is None else len(self.kept)

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Picture:
    """Hold a picture that is scaled for its model, `[C, H, W]`, and the tokens that it costs."""

    pixels: Any
    tokens: int
    vectors: int = 1

    def __len__(self) -> int:
        return self.tokens


Item = Text | Picture


def read_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a folder. Raises ConfigError if it is missing or invalid."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"model={str(folder)!r}: no tokenizer.json there; save its tokenizer as one"
        )
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises nothing more specific
        raise ConfigError(f"model={str(path)!r}: the tokenizer cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def special_tokens(folder: Path) -> dict[str, str]:
    """Return the names of a tokenizer's special tokens by their use, such as `mask_token`."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in (read_json(folder / name) or {}).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                found[key] = text
    return found


class Texts:
    """Tokenize with a folder's tokenizer and prompts.

    limit: most tokens of a text.
    vocabulary: token ids are below it.
    """

    def __init__(self, folder: Folder, limit: int, vocabulary: int):
        self.prompts = folder.prompts
        self._default, self._lower = folder.default_prompt, folder.lower
        self._limit, self._vocabulary = limit, vocabulary
        self.tokenizer = read_tokenizer(folder.transformer)
        self._special = {
            token
            for token, added in self.tokenizer.get_added_tokens_decoder().items()
            if added.special
        }

    def read(
        self, given: Sequence[str | list[int]], prompt: str = "", first: int = 0
    ) -> list[Text]:
        """Return the tokens of each text; lists of ids are taken unchanged.

        `prompt`: name of the prompt that goes before each text; empty: the folder's default, if it
        has one. `first`: index of the first text within its request, if others precede it. Raises
        BadRequest that names what is wrong and where, ContextTooLong for a text above the limit.
        """
        if prompt and prompt not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none"
            raise BadRequest(
                f"prompt_name: {prompt!r} is no prompt of this model; there are: {known}",
                param="prompt_name",
            )
        strings = [one for one in given if isinstance(one, str)]
        if strings and len(strings) < len(given):
            raise BadRequest("input: texts and lists of token ids; give either", param="input")
        if strings:
            if empty := [index for index, text in enumerate(strings) if not text]:
                raise BadRequest(
                    f"{_where(empty[0], first, len(strings))}: the text is empty; leave it out",
                    param="input",
                )
            texts = self.encode(strings, prompt or self._default)
        elif prompt:
            raise BadRequest(
                "prompt_name: goes before texts, not before token ids; leave it out",
                param="prompt_name",
            )
        else:
            texts = [Text(ids) for ids in given if not isinstance(ids, str)]
        for index, text in enumerate(texts):
            self._check(text, _where(index, first, len(given)))
        return texts

    def encode(self, given: Sequence[str], prompt: str) -> list[Text]:
        """Return the tokens of texts after a prompt, by its name; empty: after none."""
        before = self.prompts.get(prompt, "")
        prompt_tokens = self._prompt_tokens(before) if before else 0
        whole = [self._cased(before + text) for text in given]
        return [Text(found.ids, prompt_tokens) for found in self.tokenizer.encode_batch_fast(whole)]

    def _cased(self, text: str) -> str:
        return text.lower() if self._lower else text

    def _prompt_tokens(self, before: str) -> int:
        """Return how many tokens of a text belong to its prompt.

        Excludes the end token that the tokenizer adds to the prompt alone.
        """
        ids = self.tokenizer.encode(self._cased(before)).ids
        return len(ids) - bool(ids and ids[-1] in self._special)

    def _check(self, text: Text, where: str) -> None:
        if not len(text):
            raise BadRequest(f"{where}: has no tokens; leave it out", param="input")
        if len(text) > self._limit:
            message = f"{where}: has {len(text)} tokens, this model takes at most {self._limit}; split or shorten it"
            raise ContextTooLong(message, param="input")
        if min(text.ids) < 0 or max(text.ids) >= self._vocabulary:
            place = next(
                place for place, token in enumerate(text.ids) if not 0 <= token < self._vocabulary
            )
            message = f"{where}[{place}]: {text.ids[place]} is no token id of this model; they go from 0 to"
            raise BadRequest(f"{message} {self._vocabulary - 1}", param="input")


def _where(index: int, first: int, count: int) -> str:
    return "input" if first + count == 1 else f"input[{first + index}]"
