"""Render log-probabilities in the formats of chats, of completions, and of prompts (vLLM's)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from motet_shared.messages import PromptLogprob, TextLogprob


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """Hold one token as lists of completions show it.

    logprob: None for the first token of a prompt. top: alternatives, most likely first.
    """

    token: bytes
    logprob: float | None
    top: Sequence[tuple[bytes, float]]


def chat_logprobs(logprobs: list[TextLogprob]) -> dict[str, Any]:
    return {"content": [_logprob_entry(entry) for entry in logprobs], "refusal": None}


def _logprob_entry(entry: TextLogprob) -> dict[str, Any]:
    return {
        **_token(entry.token, entry.logprob),
        "top_logprobs": [_token(token, value) for token, value in entry.top],
    }


def _token(token: bytes, logprob: float) -> dict[str, Any]:
    # A token may be a part of a character; then only `bytes` is exact.
    return {"token": _text(token), "logprob": logprob, "bytes": list(token)}


def _text(token: bytes) -> str:
    return token.decode("utf-8", "replace")


def entries_of(logprobs: Sequence[TextLogprob]) -> list[TokenEntry]:
    """Return the tokens of a reply as entries."""
    return [TokenEntry(one.token, one.logprob, one.top) for one in logprobs]


def trimmed(logprobs: Sequence[PromptLogprob], alternatives: int) -> list[TokenEntry]:
    """Return the tokens of a prompt as entries with at most that many alternatives."""
    return [
        TokenEntry(
            one.token, one.logprob, [(token, value) for _, token, value in one.top[:alternatives]]
        )
        for one in logprobs
    ]


def completion_logprobs(entries: Sequence[TokenEntry], offset: int = 0) -> dict[str, Any]:
    """Render log-probabilities in the older format of parallel lists.

    `offset` is the number of characters of the tokens before these. Of alternatives with the same
    text, which are parts of characters, the most likely is shown.
    """
    tokens, offsets = [], []
    for entry in entries:
        tokens.append(_text(entry.token))
        offsets.append(offset)
        offset += len(tokens[-1])
    return {
        "tokens": tokens,
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [
            None if entry.logprob is None else _alternatives(entry.top) for entry in entries
        ],
        "text_offset": offsets,
    }


def _alternatives(top: Sequence[tuple[bytes, float]]) -> dict[str, float]:
    shown: dict[str, float] = {}
    for token, value in top:
        shown.setdefault(_text(token), value)
    return shown


def prompt_logprobs(
    logprobs: Sequence[PromptLogprob], ids: Sequence[int], alternatives: int
) -> list[dict[str, Any] | None]:
    """Render log-probabilities of a prompt by token id, as vLLM does; null for the first token."""
    shown: list[dict[str, Any] | None] = []
    for token, entry in zip(ids, logprobs, strict=True):
        if entry.logprob is None:
            shown.append(None)
            continue
        own = {str(token): _ranked(entry.token, entry.logprob, entry.rank)}
        for rank, (one, data, value) in enumerate(entry.top[:alternatives], 1):
            own.setdefault(str(one), _ranked(data, value, rank))
        shown.append(own)
    return shown


def _ranked(token: bytes, logprob: float, rank: int) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": _text(token)}
