"""Ignore parameters of other clients that cannot change an answer, according to one table.

A request is first decoded strictly (`decoding.Decoder`), so that ordinary requests cost nothing
extra. A parameter in the table is removed, and named in the response header `motet-ignored` and in
the log. Any other unknown parameter is refused by name; with `--strict`, those in the table are
refused too. Header and log contain only names from the table, never text of the client.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import msgspec
from msgspec import UNSET

log = logging.getLogger(__name__)

HEADER = b"motet-ignored"
Surface = Literal[
    "chat",
    "completions",
    "embeddings",
    "rerank",
    "score",
    "speech",
    "transcription",
    "images",
    "videos",
    "realtime",
    "responses",
    "messages",
    "tokenize",
    "ollama",
]

_HTTP: tuple[Surface, ...] = (
    "chat",
    "completions",
    "embeddings",
    "speech",
    "transcription",
    "images",
)
_TEXT: tuple[Surface, ...] = ("chat", "completions")
_MEDIA: tuple[Surface, ...] = ("embeddings", "speech", "transcription", "images")
_CHAT: tuple[Surface, ...] = ("chat",)
_REALTIME: tuple[Surface, ...] = ("realtime",)
_RESPONSES: tuple[Surface, ...] = ("responses",)
_MESSAGES: tuple[Surface, ...] = ("messages",)
_OLLAMA: tuple[Surface, ...] = ("ollama",)


@dataclass(frozen=True, slots=True)
class Hint:
    """A parameter that requests nothing; `values` are those that are ignored, None: all.

    `path` has names joined by dots; `name[]` is a list and applies to each entry.
    """

    path: str
    on: tuple[Surface, ...]
    values: tuple[Any, ...] | None = None

    def covers(self, value: Any) -> bool:
        """Return True if this value requests nothing.

        Types must match (0 is not False), except that a string matches a value's text form, such as
        "false" in a form.
        """
        if self.values is None or value is None:
            return True
        texts = (str(ok).lower() for ok in self.values) if isinstance(value, str) else ()
        return any(type(value) is type(ok) and value == ok for ok in self.values) or (
            isinstance(value, str) and value.lower() in texts
        )


def _each(
    prefix: str, names: str, on: tuple[Surface, ...], values: tuple[Any, ...] | None = None
) -> list[Hint]:
    return [Hint(prefix + name, on, values) for name in names.split()]


# Added by clients for their own records: Open WebUI, LibreChat, Continue, LiteLLM, LangChain, the
# AI SDK, LiveKit.
_RECORDS = "chat_id session_id conversation_id thread_id message_id parent_message_id request_id trace_id run_id"
_LITELLM = "litellm_metadata litellm_call_id litellm_session_id litellm_trace_id"
_OF_MESSAGES = (
    "id cache_control reasoning_details thinking_blocks annotations parsed metadata"
    " timestamp created_at createdAt model usage finish_reason logprobs provider_specific_fields"
    " provider_options providerOptions providerMetadata"
)
_OF_PARTS = "id cache_control annotations logprobs metadata provider_options providerOptions providerMetadata"
_OF_CALLS = "index cache_control provider_specific_fields extra_content"

HINTS: tuple[Hint, ...] = (
    *_each("", _RECORDS, _HTTP),
    *_each("", _LITELLM, _HTTP),
    *_each("", "metadata prompt_cache_key keep_alive", _HTTP),
    *_each("", "store", _HTTP, (False,)),
    *_each("", "user", ("embeddings", "speech", "transcription", "images", "videos")),
    *_each("", "safety_identifier", ("completions", *_MEDIA)),
    *_each("", f"{_RECORDS} {_LITELLM} metadata user", ("rerank", "score")),
    *_each("", "priority", ("rerank",)),  # of Cohere's queue
    *_each("", "max_chunks_per_doc", ("rerank",), (1,)),
    *_each("", "encoding_format", ("score",), ("float",)),
    *_each("", "service_tier", _MEDIA),
    *_each("", "verbosity prompt_cache_options prompt_cache_retention", _TEXT),
    # Defaults of other servers, which their clients send explicitly.
    *_each("", "skip_special_tokens spaces_between_special_tokens detokenize", _TEXT, (True,)),
    *_each(
        "",
        "use_beam_search include_stop_str_in_output early_stopping",
        _TEXT,
        (False,),
    ),
    *_each("", "return_tokens_as_token_ids", _TEXT, (False,)),
    *_each("", "length_penalty", _TEXT, (1, 1.0)),
    *_each("", "guided_decoding_backend", _TEXT),  # every grammar is compiled by the engine's own
    *_each("", "echo safe_prompt", _CHAT, (False,)),
    *_each("", "options", _TEXT, ({},)),
    *_each("", "chat_template_kwargs", ("completions",), ({},)),
    *_each("messages[].", _OF_MESSAGES, _CHAT),
    *_each("messages[].", "prefix", _CHAT, (False,)),
    *_each("messages[].", "type", _CHAT, ("message",)),
    *_each("messages[].content[].", _OF_PARTS, _CHAT),
    *_each("messages[].tool_calls[].", _OF_CALLS, _CHAT),
    *_each("messages[].tool_calls[].function.", "parsed_arguments provider_specific_fields", _CHAT),
    *_each("tools[].", "id cache_control metadata", _CHAT),
    *_each("tools[].function.", "cache_control metadata output_schema response", _CHAT),
    *_each("", _RECORDS, _RESPONSES),
    *_each("", _LITELLM, _RESPONSES),
    *_each("", "client_metadata prompt_cache_options prompt_cache_retention", _RESPONSES),
    *_each("text.", "verbosity", _RESPONSES),
    *_each("reasoning.", "summary generate_summary", _RESPONSES),
    *_each("input[].", "metadata provider_options providerOptions created_by", _RESPONSES),
    *_each("input[].content[].", "prompt_cache_breakpoint metadata", _RESPONSES),
    *_each("tools[].", "metadata output_schema response", _RESPONSES),
    *_each("tools[].", "defer_loading async", _RESPONSES, (False,)),
    *_each("", "metadata cache_control service_tier context_management", _MESSAGES),
    *_each("", "inference_geo speed betas", _MESSAGES),
    *_each("thinking.", "display", _MESSAGES),
    *_each("system[].", "cache_control citations", _MESSAGES),
    *_each("messages[].", "id", _MESSAGES),
    *_each("messages[].content[].", "cache_control citations caller", _MESSAGES),
    *_each("messages[].content[].content[].", "cache_control citations", _MESSAGES),
    *_each("tools[].", "cache_control eager_input_streaming input_examples", _MESSAGES),
    *_each("tools[].", "defer_loading", _MESSAGES, (False,)),
    # How a model is loaded is a setting of the stack; prompts that are too long are refused.
    *_each("", "truncate shift", _OLLAMA),
    *_each("", "verbose", _OLLAMA),
    *_each("options.", "num_ctx num_batch num_gpu main_gpu num_thread num_keep numa", _OLLAMA),
    *_each("options.", "low_vram f16_kv logits_all vocab_only use_mmap use_mlock", _OLLAMA),
    *_each("options.", "embedding_only mirostat_tau mirostat_eta", _OLLAMA),
    *_each("messages[].tool_calls[].function.", "index description", _OLLAMA),
    *_each("messages[].tool_calls[].", "type", _OLLAMA, ("function",)),
    # How the audio is sent; it is streamed in any case.
    *_each("", "stream", ("speech",), (True, False)),
    *_each("", "return_download_link", ("speech",), (False,)),
    *_each("", "volume_multiplier", ("speech",), (1, 1.0)),
    *_each("", "moderation", ("images",), ("auto", "low")),
    *_each("", "input_fidelity", ("images",), ("low",)),
    *_each(
        "session.",
        "tracing safety_identifier prompt_cache_key metadata client_secret expires_at",
        _REALTIME,
    ),
    *_each("session.", "id input_audio_noise_reduction", _REALTIME),
    *_each("session.", "object", _REALTIME, ("realtime.session", "realtime.transcription_session")),
    *_each("session.audio.input.", "noise_reduction", _REALTIME),
    *_each("item.", "metadata created_at", _REALTIME),
    *_each("item.content[].", "id metadata annotations logprobs", _REALTIME),
    *_each("response.", "id prompt_cache_key safety_identifier", _REALTIME),
    *_each("response.", "object", _REALTIME, ("realtime.response",)),
)

_Tree = dict[str, Any]  # by name: a Hint or a subtree; "[]" holds the subtree of list entries


@cache
def _tree(surface: Surface) -> _Tree:
    root: _Tree = {}
    for hint in HINTS:
        if surface in hint.on:
            *above, last = hint.path.replace("[]", ".[]").split(".")
            node = root
            for name in above:
                node = node.setdefault(name, {})
            node[last] = hint
    return root


@cache
def _members(
    surface: Surface, cls: type[msgspec.Struct]
) -> tuple[tuple[tuple[str, ...], str, Hint], ...]:
    """Return hints outside of lists that a struct may have as fields.

    Each is (path of the owner, name of the field, hint).
    """
    paths = [
        (hint.path.split("."), hint)
        for hint in HINTS
        if surface in hint.on and "[]" not in hint.path
    ]
    return tuple(
        (tuple(above), last, hint)
        for (*above, last), hint in paths
        if (*above, last)[0] in cls.__struct_fields__
    )


class Ignored:
    """Collect the parameters that were ignored in one request, by their paths in the table."""

    __slots__ = ("_surface", "paths")

    def __init__(self, surface: Surface):
        self._surface = surface
        self.paths: dict[str, None] = {}  # an ordered set: in the order in which they were found

    def prune(self, value: Any, fields: Collection[str] = ()) -> bool:
        """Remove the hints from decoded JSON, in place; return True if there were any.

        fields: names at the top whose values have types, which are refused if they are wrong.
        """
        before = len(self.paths)
        tree = _tree(self._surface)
        typed = {name for name in fields if isinstance(tree.get(name), Hint)}
        self._prune(value, {name: below for name, below in tree.items() if name not in typed})
        return len(self.paths) > before

    def _prune(self, value: Any, tree: _Tree) -> None:
        if isinstance(value, list) and (below := tree.get("[]")) is not None:
            for entry in value:
                self._prune(entry, below)
        elif isinstance(value, dict):
            for name in tree.keys() & value.keys():
                below = tree[name]
                if not isinstance(below, Hint):
                    self._prune(value[name], below)
                elif below.covers(value[name]):
                    del value[name]
                    self.paths[below.path] = None

    def prune_form(self, fields: dict[str, list[str]]) -> None:
        """Remove the hints from a form's fields, in place; `metadata[key]` counts as `metadata`."""
        tree = _tree(self._surface)
        for name in list(fields):
            hint = tree.get(name.partition("[")[0])
            if isinstance(hint, Hint) and all(hint.covers(value) for value in fields[name]):
                del fields[name]
                self.paths[hint.path] = None

    def clear(self, body: msgspec.Struct) -> None:
        """Reset hints that the struct has as fields to their defaults."""
        for above, last, hint in _members(self._surface, type(body)):
            owner: Any = body
            for name in above:
                owner = getattr(owner, name, None)
            value = getattr(owner, last, None)
            if (
                value is not None
                and value is not UNSET
                and isinstance(owner, msgspec.Struct)
                and hint.covers(value)
            ):
                setattr(owner, last, _default(type(owner), last))
                self.paths[hint.path] = None

    @property
    def names(self) -> str:
        """Return the ignored paths joined by commas, as shown in header and log."""
        return ", ".join(self.paths)


@cache
def _defaults(cls: type[msgspec.Struct]) -> Mapping[str, Any]:
    return {field.name: field.default for field in msgspec.structs.fields(cls)}


def _default(cls: type[msgspec.Struct], name: str) -> Any:
    return _defaults(cls)[name]
