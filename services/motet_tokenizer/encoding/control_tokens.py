"""Find the control tokens that a template writes, so that a client cannot write any.

A prompt is encoded as usual (`encode_safely` returns None) if no string of the client has a
character that a control token could begin with, and if the template cannot complete one around a
client's string. Else it is rendered with protected strings (`client_text`), and only the control
tokens that remain in that rendering are the template's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from jinja2 import nodes
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

# What `apply_chat_template` itself renders with; the public function drops subclasses of `str`.
from transformers.utils.chat_template_utils import _alias_reasoning_fields, _compile_jinja_template

from motet_tokenizer.encoding.client_text import Guard, restore

# Filters that add no characters. After any other, each character of a token is protected.
_FILTERS = frozenset(
    "tojson trim string length count join items list first last default d map select selectattr reject rejectattr"
    " unique batch slice reverse dictsort sort sum min max int float abs round replace lower upper title capitalize"
    " safe indent attr groupby".split()
)
_METHODS = frozenset({"encode", "decode", "translate", "format", "format_map", "expandtabs"})
# Tokens that could begin with the punctuation that `tojson` writes before a client's text.
_JSON_BEGINS = re.compile(r'["\d:,\s-]|\[["{\[\dtfn\]-]|\{["}]|[\]}]')


class ControlTokens:
    """Hold the control tokens of one tokenizer and template.

    Immutable after loading, so threads may share it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str):
        added = tokenizer.added_tokens_decoder
        self._ids = {
            token.content: number
            for number, token in added.items()
            if token.content
            and (token.special or (token.content in source and not token.content.isspace()))
        }
        self._source = source
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self._names = dict(tokenizer.special_tokens_map)
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if self._ids else None
        self._always = bool(self._ids) and self._may_be_completed()
        characters = (
            "".join(self._ids) if self._always else "".join({token[0] for token in self._ids})
        )
        self._guard = Guard(characters)
        self._safe_backend = self._build_safe_backend() if self._ids else None

    def encode_safely(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        options: dict[str, Any],
        cut: Callable[[str], str] = str,
    ) -> list[int] | None:
        """Return the ids of messages that may hold control tokens of a client; None if they cannot.

        options: variables of the template. cut: applied to the rendered text. Raises ValueError where the
        tokenizer would make a control token of plain text.
        """
        guard, pattern = self._guard, self._pattern
        if pattern is None or self._safe_backend is None:
            return None
        if (
            not self._always
            and not guard.has_protected(messages)
            and not guard.has_protected(tools)
            and not guard.has_protected(options)
        ):
            return None
        rendered = self._render(
            [guard.message(m) for m in messages], guard.strings(tools), guard.strings(options)
        )
        text = cut(guard.unescaped(rendered))
        wanted = [(match[0], match.start()) for match in pattern.finditer(text)]
        plain = restore(text)
        if not self._always and wanted == [
            (match[0], match.start()) for match in pattern.finditer(plain)
        ]:
            return list(self._backend.encode(plain, add_special_tokens=False).ids)
        ids = list(self._safe_backend.encode(text, add_special_tokens=False).ids)
        control = frozenset(self._ids.values())
        if [i for i in ids if i in control] != [self._ids[token] for token, _ in wanted]:
            raise ValueError("its text would become control tokens; leave out what looks like one")
        return ids

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        options: dict[str, Any],
    ) -> str:
        template = _compile_jinja_template(self._source)
        shown = _alias_reasoning_fields(messages)
        return str(
            template.render(
                messages=shown,
                tools=tools or None,
                documents=None,
                **{"add_generation_prompt": True, **self._names, **options},
            )
        )

    # ----------------------------------------------------------------------------------- at loading
    def _may_be_completed(self) -> bool:
        """Return True if template or tokenizer may complete client text to a control token."""
        first = {token[0] for token in self._ids}
        if any(_JSON_BEGINS.match(token) for token in self._ids) or self._is_normalized(first):
            return True
        if not self._source:
            return False
        tree = _compile_jinja_template(self._source).environment.parse(self._source)
        if any(node.name not in _FILTERS for node in tree.find_all(nodes.Filter)):
            return True
        if any(node.attr in _METHODS for node in tree.find_all(nodes.Getattr)) or tree.find(
            nodes.Mod
        ):
            return True
        texts = [node.data for node in tree.find_all(nodes.TemplateData)]
        texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
        return any(map(self._ends_within_a_token, texts))

    def _ends_within_a_token(self, text: str) -> bool:
        return any(
            text.endswith(token[:length]) for token in self._ids for length in range(1, len(token))
        )

    def _is_normalized(self, first: set[str]) -> bool:
        """Return True if normalization may create a first character of a token matched after it."""
        document = json.loads(self._backend.to_str())
        normalized = [token for token in document["added_tokens"] if token["normalized"]]
        return any(token["content"] in self._ids for token in normalized) and _makes(
            document["normalizer"], first
        )

    def _build_safe_backend(self) -> Tokenizer:
        """Build a tokenizer that matches control tokens before twins are turned back."""
        document = json.loads(self._backend.to_str())
        for token in document["added_tokens"]:
            if token["content"] in self._ids:
                token["normalized"] = False
        own = [document["normalizer"]] if document["normalizer"] is not None else []
        document["normalizer"] = {"type": "Sequence", "normalizers": [*self._guard.rules(), *own]}
        safe_backend = Tokenizer.from_str(json.dumps(document))
        safe_backend.no_truncation()
        safe_backend.no_padding()
        return safe_backend


def _makes(normalizer: dict[str, Any] | None, characters: set[str]) -> bool:
    """Return True if a normalizer may create one of `characters` from others."""
    if normalizer is None:
        return False
    kind = normalizer["type"]
    if kind == "Sequence":
        return any(_makes(part, characters) for part in normalizer["normalizers"])
    if kind == "Replace":
        return not characters.isdisjoint(normalizer["content"])
    if kind == "Prepend":
        return not characters.isdisjoint(normalizer["prepend"])
    return kind != "NFC" or not characters <= set("<[{|")  # composition creates none of these
