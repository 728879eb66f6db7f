"""Batch conversations as padded tokens with loss weights, by training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from recipes.chat import tokenizer as chat_tokenizer
from recipes.chat.data import Conversation
from recipes.chat.recipe import Recipe
from recipes.chat.stream import training_conversation
from recipes.training.ranks import Ranks

Item = TypeVar("Item")

MAX_LENGTH = 1024
MICRO_BATCH = 1536


def render(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> str:
    """Render a conversation with the tokenizer's chat template."""
    return tokenizer.apply_chat_template(
        list(conversation.messages), tools=list(conversation.tools) or None, tokenize=False
    )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Hold right-padded rows [B, T] of similar length.

    weights: loss weight of each token as a target.
    """

    tokens: Tensor
    weights: Tensor


def pad(rows: Sequence[tuple[list[int], list[float]]], padding: int) -> Batch:
    """Pad rows of token ids and weights to the length of the last, longest one."""
    length = len(rows[-1][0])
    tokens = torch.tensor([ids + [padding] * (length - len(ids)) for ids, _ in rows])
    weights = torch.tensor([weights + [0.0] * (length - len(weights)) for _, weights in rows])
    return Batch(tokens=tokens, weights=weights)


def chunked(
    rows: Iterable[Item], length: Callable[[Item], int], *, most: int = MICRO_BATCH
) -> list[list[Item]]:
    """Split rows, sorted by length, into chunks of at most `most` padded tokens, or one row."""
    chunks: list[list[Item]] = [[]]
    for row in rows:
        if chunks[-1] and length(row) * (len(chunks[-1]) + 1) > most:
            chunks.append([])
        chunks[-1].append(row)
    return chunks


class ConversationEncoder:
    """Encode conversations as token ids with loss weights."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, prompt_weight: float) -> None:
        self.tokenizer, self.prompt_weight = tokenizer, prompt_weight
        self.turn = f"{chat_tokenizer.TURN_START}assistant\n"

    def encode(self, conversation: Conversation) -> tuple[list[int], list[float]]:
        """Return token ids and loss weights: 1 for the assistant's replies, end of turn included."""
        ids: list[int] = []
        weights: list[float] = []
        head, *turns = render(self.tokenizer, conversation).split(self.turn)
        self._put(head, self.prompt_weight, ids, weights)
        for turn in turns:
            reply, end, rest = turn.partition(chat_tokenizer.TURN_END)
            self._put(self.turn, self.prompt_weight, ids, weights)
            self._put(reply + end, 1.0, ids, weights)
            self._put(rest, self.prompt_weight, ids, weights)
        return ids[:MAX_LENGTH], weights[:MAX_LENGTH]

    def _put(self, text: str, weight: float, ids: list[int], weights: list[float]) -> None:
        new = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        ids += new
        weights += [weight] * len(new)


class Stream:
    """Serve batches by step, or one rank's share of them.

    Causal attention needs no mask for padding on the right.
    """

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerFast,
        ranks: Ranks | None = None,
    ) -> None:
        self.recipe, self.pad, self.ranks = recipe, tokenizer.pad_token_id, ranks or Ranks()
        self.encoder = ConversationEncoder(tokenizer, recipe.prompt_weight)

    def batches(self, step: int) -> list[Batch]:
        """Return the micro-batches of `step`, each of about MICRO_BATCH padded tokens."""
        indices = self.recipe.span(step)[self.ranks.rank :: self.ranks.count]
        mix = self.recipe.phase(step).mix
        conversation = [
            training_conversation(self.recipe.seed, index, mix=mix) for index in indices
        ]
        rows = sorted(
            (self.encoder.encode(one) for one in conversation), key=lambda row: len(row[0])
        )
        return [pad(chunk, self.pad) for chunk in chunked(rows, lambda row: len(row[0]))]

    def prefetch(self, start: int, stop: int) -> Iterator[list[Batch]]:
        """Yield the batches of steps `start` to `stop`, each computed one step ahead in a thread."""
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(self.batches, start)
            for step in range(start, stop):
                ready, pending = pending.result(), pool.submit(self.batches, step + 1)
                yield ready
