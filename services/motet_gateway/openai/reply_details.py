"""Describe what a request wants of a reply besides its text."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplyDetails:
    """Parts of a reply that are rendered on request.

    token_ids: the ids of prompt and reply. echo_logprobs: the prompt's tokens are among `logprobs`,
    with that many alternatives; -1: they are not. prompt_logprobs: they are in a list of their own.
    """

    token_ids: bool = False
    echo_logprobs: int = -1
    prompt_logprobs: int = -1

    @property
    def any(self) -> bool:
        return self.token_ids or self.scores_prompt

    @property
    def scores_prompt(self) -> bool:
        return self.echo_logprobs >= 0 or self.prompt_logprobs >= 0


NO_DETAILS = ReplyDetails()
