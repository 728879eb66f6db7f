"""Describe one model for the tokenizer: ids, texts, chat template, end tokens, context length.

Read from a checkpoint folder (or hub name) without its weights, and without torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers.models import BPE
from transformers import AutoTokenizer
from transformers.utils import cached_file

from motet_models.checkpoints import check_numbers
from motet_models.context import trained_context
from motet_models.image_support import (
    Sense,
    accepts_audio,
    accepts_images,
    marks,
    placeholders,
)
from motet_models.omni import stage_config
from motet_shared.errors import BadRequest, ConfigError
from motet_shared.messages import ModelCard
from motet_shared.text.pieces import build_pieces, hidden_ids
from motet_tokenizer.detokenizer import (
    ByteDetokenizer,
    Detokenizer,
    FallbackDetokenizer,
    WindowDetokenizer,
)
from motet_tokenizer.dialect import Dialect
from motet_tokenizer.encoding.infill import Infill, no_infill
from motet_tokenizer.encoding.template import ChatTemplate
from motet_tokenizer.encoding.template_options import TemplateOptions
from motet_tokenizer.response_template import ResponseFormat
from motet_tokenizer.sampling_defaults import SamplingDefaults

_NO_DEFAULTS = SamplingDefaults()
_NO_LIMIT = 10**9  # transformers' tokenizers report a larger number if they know no limit


class Vocabulary:
    """Hold the tokenizer of a model. `name` is what clients call the model.

    Immutable after loading, so threads may share it.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Any,
        config: dict[str, Any],
        generation: dict[str, Any],
        created: int = 0,
        tool_format: str = "auto",
        reasoning_format: str = "auto",
        sampling: SamplingDefaults = _NO_DEFAULTS,
    ):
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise ConfigError(
                f"model: {name!r} has a {type(tokenizer).__name__}, which is not backed by the tokenizers library; "
                "convert it to a tokenizer.json",
                param="model",
            )
        self.name = name
        self.sampling = sampling
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        config = dict(stage_config(config))
        text_config = config.get("text_config") or config
        added = self.backend.get_added_tokens_decoder()
        known = max(self.backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self.size = max(int(text_config.get("vocab_size") or 0), known)
        self.context = _context(name, text_config, tokenizer)
        self.eos_ids = _eos_ids(generation, text_config, tokenizer)
        sees, hears = accepts_images(config), accepts_audio(config)
        senses: dict[Sense, bool] = {"image": sees, "audio": hears}
        self.placeholders = {placeholders(config)[sense] for sense, has in senses.items() if has}
        self.media_marks: dict[str, int] = {
            sense: token for sense, token in marks(config).items() if senses[sense]
        }
        self.infill = Infill.of(self.backend)
        self._hidden = hidden_ids(self.backend)
        self.controls = {i: self.backend.id_to_token(i) or "" for i in self._hidden}
        self.dialect = Dialect.of(
            str(tokenizer.chat_template or ""),
            tool_format,
            reasoning_format,
            lambda: _response_format(tokenizer, name, self.controls.values()),
        )
        reasoning = self.dialect.reasoning_format
        self.template = ChatTemplate(
            tokenizer,
            name,
            self.media_marks,
            reasoning,
            id_length=self.dialect.id_length,
        )
        self.options = TemplateOptions(
            self.template.source,
            name,
            reserved=frozenset(tokenizer.special_tokens_map),
            levels=reasoning.levels if reasoning is not None else (),
            reasons=self.dialect.reasons,
        )
        if reasoning is not None:
            ends = map(self.backend.token_to_id, reasoning.ends)
            self.eos_ids |= frozenset(i for i in ends if i is not None)
        self._pieces = build_pieces(self.backend, self.size)
        self._spelling: dict[int, bytes] = {}
        tools = self.template.takes_tools and self.dialect.calls_tools
        has_template = bool(self.template.source)
        self.card = ModelCard(
            name=name,
            context=self.context,
            created=created,
            tools=tools,
            reasoning=self.dialect.reasons,
            reasoning_switch=self.options.can_switch_off,
            chat=has_template,
            sampling=dict(sampling.values),
            images=sees and has_template,
            audio=hears and has_template,
            vocab_size=self.size,
            longest_token=_longest_token(self.backend),
            infill=self.infill is not None,
        )

    @classmethod
    def load(
        cls,
        name: str,
        path: str,
        tool_format: str = "auto",
        reasoning_format: str = "auto",
        *,
        chat_template: str | None = None,
        generation_config: str = "auto",
    ) -> Vocabulary:
        """Load a checkpoint folder or a hub name.

        tool_format: name of a format of tool calls, or "auto" for that of the chat template.
        reasoning_format: as `tool_format`, or "none". chat_template: file of a template in place of
        the checkpoint's. generation_config: "auto" for the checkpoint's, "none", or a file, for
        recommended sampling. Raises ConfigError that names the problem.
        """
        try:
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
            config_file = cached_file(
                path, "config.json", _raise_exceptions_for_missing_entries=False
            )
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(
                f"model: cannot load the tokenizer of {name}={path}: {error}", param="model"
            ) from error
        if config_file is None:
            raise ConfigError(
                f"model: {name}={path} has no config.json; give a checkpoint folder", param="model"
            )
        check_numbers(Path(config_file).parent)
        generation_file = cached_file(
            path, "generation_config.json", _raise_exceptions_for_missing_entries=False
        )
        if chat_template is not None:
            tokenizer.chat_template = _read_text(chat_template)
        elif tokenizer.chat_template is None:  # older vision checkpoints keep it in its own file
            template_file = cached_file(
                path, "chat_template.json", _raise_exceptions_for_missing_entries=False
            )
            tokenizer.chat_template = _read(template_file).get("chat_template")
        created = int(Path(config_file).stat().st_mtime)
        generation = _read(generation_file)
        recommended = generation if generation_config == "auto" else {}
        if generation_config not in ("auto", "none"):
            recommended = _read(generation_config)
        return cls(
            name,
            tokenizer,
            _read(config_file),
            generation,
            created,
            tool_format,
            reasoning_format,
            SamplingDefaults.of(recommended),
        )

    # ----------------------------------------------------------------------------------------- text
    def encode(self, text: str, suffix: str = "", *, special_tokens: bool = True) -> list[int]:
        """Return the ids of a raw prompt, by default with the model's beginning-of-text token.

        suffix: text behind the gap that the reply fills. Raises UnsupportedParameter where the
        tokenizer has no tokens for that.
        """
        if not suffix:
            return list(self.backend.encode(text, add_special_tokens=special_tokens).ids)
        if self.infill is None:
            raise no_infill(self.name)
        return self.infill.encode(self.backend, text, suffix)

    def decode(self, ids: list[int]) -> str:
        """Return the text of a prompt given as ids, without special tokens."""
        detokenizer = self.detokenizer()
        return detokenizer.feed(ids) + detokenizer.flush()

    def decode_all(self, ids: list[int]) -> str:
        """Return the text of ids, with special tokens by their names."""
        text: str = self.backend.decode(ids, skip_special_tokens=False)
        return text

    def detokenizer(self, *, continues: bool = False) -> Detokenizer:
        """Return a detokenizer for one request.

        `continues`: the text continues a prompt, so a leading space is part of it.
        """
        if self._pieces is None:
            return WindowDetokenizer(self.backend, self._hidden)
        if self._pieces.byte_fallback or self._pieces.strip:
            return FallbackDetokenizer(self._pieces, 0 if continues else self._pieces.strip)
        return ByteDetokenizer(self._pieces)

    def tail(self, prompt: list[int], count: int) -> str:
        """Return the last `count` tokens of a prompt as text, with special tokens."""
        text: str = self.backend.decode(prompt[-count:], skip_special_tokens=False)
        return text

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token; of a special token, its name."""
        spelling = self._spelling.get(token)
        if spelling is None:
            spelling = self._spelling[token] = self._spell(token)
        return spelling

    def _spell(self, token: int) -> bytes:
        if self._pieces is not None and token not in self._hidden and 0 <= token < self.size:
            return self._pieces.data[token]
        return (self.backend.id_to_token(token) or "").encode() if token >= 0 else b""

    def check_ids(self, ids: list[int], param: str) -> None:
        """Raise BadRequest for an id outside the vocabulary."""
        if ids and (min(ids) < 0 or max(ids) >= self.size):
            wrong = next(i for i in ids if not 0 <= i < self.size)
            raise BadRequest(
                f"{param}: token id {wrong} is outside of the vocabulary of {self.name!r}; give 0 to {self.size - 1}",
                param=param,
            )


def _read_text(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"chat_template: cannot read {path}: {error}", param="chat_template"
        ) from error


def _read(path: str | None) -> dict[str, Any]:
    """Return the JSON object of a file; {} if `path` is None.

    Raises ConfigError if it cannot be read or is no object.
    """
    if path is None:
        return {}
    try:
        document = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: cannot read {path}: {error}", param="model") from error
    if not isinstance(document, dict):
        raise ConfigError(
            f"model: {path} is no JSON object; give a checkpoint folder", param="model"
        )
    return document


def _response_format(tokenizer: Any, name: str, controls: Iterable[str]) -> ResponseFormat | None:
    template = getattr(tokenizer, "response_template", None)
    return None if template is None else ResponseFormat(template, name, controls)


def _context(name: str, config: dict[str, Any], tokenizer: Any) -> int:
    if (trained := trained_context(config)) is not None:
        return trained
    limit = getattr(tokenizer, "model_max_length", None)
    if isinstance(limit, int) and 0 < limit < _NO_LIMIT:
        return limit
    message = f"model: {name!r} does not say its context length; add max_position_embeddings to its config.json"
    raise ConfigError(message, param="model")


def _longest_token(backend: Any) -> int:
    """Return the most characters of a token; 0 if an unknown token may stand for any number."""
    model = backend.model
    if not isinstance(model, BPE) or (model.unk_token is not None and not model.byte_fallback):
        return 0
    return max(map(len, backend.get_vocab(with_added_tokens=True)), default=0)


def _eos_ids(generation: dict[str, Any], config: dict[str, Any], tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a reply.

    They are those of generation_config.json (else config.json), and the tokenizer's own.
    """
    listed = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = {listed} if isinstance(listed, int) else set(listed or ())
    if tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    limit = config.get("vocab_size")  # a tokenizer may know more tokens than its model
    return frozenset(i for i in ids if not isinstance(limit, int) or i < limit)
