"""Conversations as padded token batches with loss weights, by training step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import chat_tokenizer
from chat_data import Conversation
from chat_recipe import Recipe
from chat_stream import conversation

Item = TypeVar("Item")

MAX_LENGTH = 1024
MICRO_BATCH = 1536


def render(tokenizer: PreTrainedTokenizerFast, made: Conversation) -> str:
    return tokenizer.apply_chat_template(
        list(made.messages), tools=list(made.tools) or None, tokenize=False
    )


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Right-padded rows [B, T] of similar length; `weights` is the loss weight of each token as a target."""

    tokens: Tensor
    weights: Tensor


def pad(rows: Sequence[tuple[list[int], list[float]]], padding: int) -> Batch:
    """Rows of token ids and weights, the longest one last, as a batch."""
    length = len(rows[-1][0])
    tokens = torch.tensor([ids + [padding] * (length - len(ids)) for ids, _ in rows])
    weights = torch.tensor([weights + [0.0] * (length - len(weights)) for _, weights in rows])
    return Batch(tokens=tokens, weights=weights)


def chunked(rows: Iterable[Item], length: Callable[[Item], int]) -> list[list[Item]]:
    """Rows, shorter ones first, in parts of about `MICRO_BATCH` padded tokens."""
    chunks: list[list[Item]] = [[]]
    for row in rows:
        if chunks[-1] and length(row) * (len(chunks[-1]) + 1) > MICRO_BATCH:
            chunks.append([])
        chunks[-1].append(row)
    return chunks


class Encoder:
    """Conversations as token ids with loss weights."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, prompt_weight: float) -> None:
        self.tokenizer, self.prompt_weight = tokenizer, prompt_weight
        self.turn = f"{chat_tokenizer.TURN_START}assistant\n"

    def encode(self, made: Conversation) -> tuple[list[int], list[float]]:
        """Token ids and loss weights: 1 for what the assistant says up to its end of turn."""
        ids: list[int] = []
        weights: list[float] = []
        head, *turns = render(self.tokenizer, made).split(self.turn)
        self._put(head, self.prompt_weight, ids, weights)
        for turn in turns:
            said, end, rest = turn.partition(chat_tokenizer.TURN_END)
            self._put(self.turn, self.prompt_weight, ids, weights)
            self._put(said + end, 1.0, ids, weights)
            self._put(rest, self.prompt_weight, ids, weights)
        return ids[:MAX_LENGTH], weights[:MAX_LENGTH]

    def _put(self, text: str, weight: float, ids: list[int], weights: list[float]) -> None:
        new = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        ids += new
        weights += [weight] * len(new)


class Stream:
    """Batches by step, or one worker's share of them. Causal attention needs no mask for padding on the right."""

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: PreTrainedTokenizerFast,
        *,
        worker: int = 0,
        workers: int = 1,
    ) -> None:
        self.recipe, self.pad, self.worker, self.workers = (
            recipe,
            tokenizer.pad_token_id,
            worker,
            workers,
        )
        self.encoder = Encoder(tokenizer, recipe.prompt_weight)

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of `step`, each of about `MICRO_BATCH` padded tokens."""
        mine = self.recipe.span(step)[self.worker :: self.workers]
        mix = self.recipe.phase(step).mix
        made = [conversation(self.recipe.seed, index, mix=mix) for index in mine]
        rows = sorted((self.encoder.encode(one) for one in made), key=lambda row: len(row[0]))
        return [pad(chunk, self.pad) for chunk in chunked(rows, lambda row: len(row[0]))]

    def ahead(self, start: int, stop: int) -> Iterator[list[Batch]]:
        """The batches of steps `start` to `stop`, made one step ahead in a thread."""
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(self.batches, start)
            for step in range(start, stop):
                ready, coming = coming.result(), pool.submit(self.batches, step + 1)
                yield ready
