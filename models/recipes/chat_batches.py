"""Conversations as padded token batches with loss weights, by training step."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

import chat_tokenizer
from chat_data import Conversation
from chat_recipe import Recipe
from chat_stream import conversation

MAX_LENGTH = 1024
MICRO_BATCH = 1536


def render(tokenizer: PreTrainedTokenizerFast, made: Conversation) -> str:
    return tokenizer.apply_chat_template(list(made.messages), tools=list(made.tools) or None, tokenize=False)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Right-padded rows [B, T] of similar length; `weights` is the loss weight of each token as a target."""

    tokens: Tensor
    weights: Tensor


class Stream:
    """Batches by step, or one worker's share of them. Causal attention needs no mask for padding on the right."""

    def __init__(
        self, recipe: Recipe, tokenizer: PreTrainedTokenizerFast, *, worker: int = 0, workers: int = 1
    ) -> None:
        self.recipe, self.tokenizer, self.worker, self.workers = recipe, tokenizer, worker, workers
        self.turn = f"{chat_tokenizer.TURN_START}assistant\n"

    def encode(self, made: Conversation) -> tuple[list[int], list[float]]:
        """Token ids and loss weights: 1 for what the assistant says up to its end of turn."""
        ids: list[int] = []
        weights: list[float] = []
        head, *turns = render(self.tokenizer, made).split(self.turn)
        self._put(head, self.recipe.prompt_weight, ids, weights)
        for turn in turns:
            said, end, rest = turn.partition(chat_tokenizer.TURN_END)
            self._put(self.turn, self.recipe.prompt_weight, ids, weights)
            self._put(said + end, 1.0, ids, weights)
            self._put(rest, self.recipe.prompt_weight, ids, weights)
        return ids[:MAX_LENGTH], weights[:MAX_LENGTH]

    def _put(self, text: str, weight: float, ids: list[int], weights: list[float]) -> None:
        new = self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        ids += new
        weights += [weight] * len(new)

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of `step`, each of about `MICRO_BATCH` padded tokens."""
        mine = self.recipe.span(step)[self.worker :: self.workers]
        mix = self.recipe.phase(step).mix
        made = [conversation(self.recipe.seed, index, mix=mix) for index in mine]
        rows = sorted((self.encode(one) for one in made), key=lambda row: len(row[0]))
        chunks: list[list[tuple[list[int], list[float]]]] = [[]]
        for row in rows:
            if chunks[-1] and len(row[0]) * (len(chunks[-1]) + 1) > MICRO_BATCH:
                chunks.append([])
            chunks[-1].append(row)
        return [self._pad(chunk) for chunk in chunks]

    def _pad(self, rows: list[tuple[list[int], list[float]]]) -> Batch:
        length, pad = len(rows[-1][0]), self.tokenizer.pad_token_id
        tokens = torch.tensor([ids + [pad] * (length - len(ids)) for ids, _ in rows])
        weights = torch.tensor([weights + [0.0] * (length - len(weights)) for _, weights in rows])
        return Batch(tokens=tokens, weights=weights)

    def ahead(self, start: int, stop: int) -> Iterator[list[Batch]]:
        """The batches of steps `start` to `stop`, made one step ahead in a thread."""
        with ThreadPoolExecutor(1) as pool:
            coming = pool.submit(self.batches, start)
            for step in range(start, stop):
                ready, coming = coming.result(), pool.submit(self.batches, step + 1)
                yield ready
