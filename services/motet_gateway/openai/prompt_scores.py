"""Bound the log-probabilities of prompts that one answer holds."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from motet_pipelines.chat.chat import Outcome
from motet_shared.errors import BadRequest
from motet_shared.messages import PromptPiece

from .generate import Source
from .reply_details import ReplyDetails

MAX_ENTRIES = 1 << 19  # of all choices of a call: tokens, each with its alternatives


def bounded_scores(source: Source, details: ReplyDetails) -> Source:
    """Return a source that raises BadRequest where a call's prompts have too many scores."""
    if not details.scores_prompt:
        return source
    entries = 0

    async def bounded(request: Any, outcome: Outcome) -> AsyncGenerator[list[Any], None]:
        nonlocal entries
        async with aclosing(source(request, outcome)) as batches:
            async for batch in batches:
                entries += sum(map(_entries, batch))
                if entries > MAX_ENTRIES:
                    raise _too_many(details)
                yield batch

    return bounded


def _entries(item: Any) -> int:
    if not isinstance(item, PromptPiece) or item.logprobs is None:
        return 0
    return sum(1 + len(entry.top) for entry in item.logprobs)


def _too_many(details: ReplyDetails) -> BadRequest:
    param = "prompt_logprobs" if details.prompt_logprobs >= 0 else "logprobs"
    return BadRequest(
        f"`{param}`: the prompts have more than {MAX_ENTRIES} log-probabilities together; send fewer "
        "prompts at once, or ask for fewer alternatives",
        param=param,
    )
