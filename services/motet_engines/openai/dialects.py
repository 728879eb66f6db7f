"""Know which parameters servers have beyond OpenAI's, by the server's kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from motet_engines.engine import ALL_GRAMMARS, ALL_SAMPLING

# Of `messages.Sampling`, as OpenAI's completions and chats have them.
_OPENAI_SAMPLING = frozenset({"presence_penalty", "frequency_penalty", "logit_bias"})


@dataclass(frozen=True, kw_only=True)
class ServerDialect:
    """Describe a kind of server.

    sampling: fields of `messages.Sampling` that it has. names: its names of them, where they differ.
    structured_outputs: grammars go into that field; else only schemas, as `response_format`.
    lark: its grammars may be in Lark's syntax, with JSON schemas and nested grammars.
    stop_ids: it has `stop_token_ids`. logprob_ids: it names tokens of log-probabilities by id.
    load: names of its metrics by those of decode's heartbeats. max_tokens: its name of that field.
    chat_ids: its chats return token ids and the usage so far. prompt_logprobs: its completions
    return log-probabilities of prompts. max_pixels: its pictures have that field.
    """

    name: str
    sampling: frozenset[str] = ALL_SAMPLING
    names: Mapping[str, str] = field(default_factory=dict)
    structured_outputs: bool = True
    lark: bool = False
    stop_ids: bool = False
    logprob_ids: bool = True
    load: Mapping[str, str] = field(default_factory=dict)
    max_tokens: str = "max_tokens"
    chat_ids: bool = False
    prompt_logprobs: bool = False
    max_pixels: bool = False

    @property
    def grammars(self) -> frozenset[str]:
        """Return the kinds of grammars that it has."""
        return ALL_GRAMMARS if self.structured_outputs else frozenset({"json_schema"})


DIALECTS: dict[str, ServerDialect] = {
    dialect.name: dialect
    for dialect in (
        ServerDialect(
            name="vllm",
            stop_ids=True,
            lark=True,
            chat_ids=True,
            prompt_logprobs=True,
            load={
                "vllm:num_requests_running": "running",
                "vllm:num_requests_waiting": "queued",
                "vllm:kv_cache_usage_perc": "kv_used",
                "vllm:gpu_cache_usage_perc": "kv_used",
            },
        ),
        ServerDialect(
            name="motet", lark=True, chat_ids=True, prompt_logprobs=True, max_pixels=True
        ),
        ServerDialect(
            name="sglang",
            structured_outputs=False,
            stop_ids=True,
            logprob_ids=False,
            load={
                "sglang:num_running_reqs": "running",
                "sglang:num_queue_reqs": "queued",
                "sglang:token_usage": "kv_used",
            },
        ),
        ServerDialect(
            name="openai",
            sampling=_OPENAI_SAMPLING,
            structured_outputs=False,
            logprob_ids=False,
        ),
        ServerDialect(
            name="llama.cpp",
            names={"repetition_penalty": "repeat_penalty"},
            sampling=ALL_SAMPLING - {"min_tokens"},
            structured_outputs=False,
            load={
                "llamacpp:requests_processing": "running",
                "llamacpp:requests_deferred": "queued",
                "llamacpp:kv_cache_usage_ratio": "kv_used",
            },
        ),
    )
}
# What `owned_by` is in a server's list of models.
_OWNERS = {"vllm": "vllm", "motet": "motet", "sglang": "sglang", "llamacpp": "llama.cpp"}


def dialect_of(models: list[dict[str, Any]]) -> ServerDialect:
    """Return the dialect that a server's list of models tells; OpenAI's if it tells none."""
    owners = {str(model.get("owned_by")) for model in models}
    found = next((_OWNERS[owner] for owner in sorted(owners) if owner in _OWNERS), "openai")
    return DIALECTS[found]
