"""Check batch invariance before a model serves, as the setting `deterministic` promises it.

Whether rows depend on each other is decided in the innermost loops of matrix products and cannot be
seen from the model's code. So one sequence is computed alone and in one piece, then in chunks and
batched with others, and the bits are compared.
"""

from __future__ import annotations

from array import array
from itertools import count

import torch
from torch import Tensor

from motet_llm.engine.model_runner import ModelRunner
from motet_llm.engine.request import Request
from motet_llm.scheduling.work import Work
from motet_shared.errors import ConfigError
from motet_shared.messages import Sampling

PROMPT = 21
OUTPUT = 3
BATCH_LENGTHS = (1, 2, 5, 13, 30)  # prompt lengths of the other sequences in the batch
CHUNK_SIZES = (4, 16, 1)  # sizes of the prompt's chunks


def check(runner: ModelRunner, *, speculates: bool = False) -> None:
    """Raise ConfigError if any logit of a sequence depends on the rows computed beside it.

    speculates: also if it depends on whether the output is computed token by token or as drafts.
    """
    num_sequences = 1 + 3 * len(BATCH_LENGTHS)
    longest = max(PROMPT, *BATCH_LENGTHS) + OUTPUT + len(CHUNK_SIZES)
    with runner.other_caches(num_sequences, longest):
        alone = _Trial(runner).run((PROMPT,), ())
        for chunk_sizes, others in (
            ((PROMPT,), BATCH_LENGTHS),
            (CHUNK_SIZES, ()),
            (CHUNK_SIZES, BATCH_LENGTHS),
            (CHUNK_SIZES, BATCH_LENGTHS * 3),
        ):
            if not torch.equal(alone, _Trial(runner).run(chunk_sizes, others)):
                raise ConfigError(
                    f"deterministic=true: {runner.model_type} computes other bits in a batch than alone; "
                    "leave it off for this model"
                )
        if speculates and not torch.equal(alone, _Trial(runner).run_drafted()):
            raise ConfigError(
                f"deterministic=true: {runner.model_type} computes other bits for a draft than token by token; "
                "leave it or speculate off for this model"
            )


class _Trial:
    """Compute test sequences with blocks and states of their own."""

    def __init__(self, runner: ModelRunner):
        self._runner = runner
        self._blocks = count()
        self._slots = count()

    def run(self, chunk_sizes: tuple[int, ...], others: tuple[int, ...]) -> Tensor:
        """Return logits after the prompt and after each of `OUTPUT` tokens, `[1 + OUTPUT, V]`."""
        subject = self._sequence(0, PROMPT)
        batch = [self._sequence(1 + i, length) for i, length in enumerate(others)]
        found = [self._step(subject, size, batch) for size in (*chunk_sizes, *[1] * OUTPUT)]
        return torch.cat(found[len(chunk_sizes) - 1 :])

    def run_drafted(self) -> Tensor:
        """Return the same logits with the output as a draft, batched with another draft."""
        subject, other = self._sequence(0, PROMPT), self._sequence(1, BATCH_LENGTHS[-1])
        found = [self._step(subject, PROMPT, [other])]
        draft, token = [], subject.tokens[-1]
        for _ in range(OUTPUT - 1):
            draft.append(token := self._next(token))
        works = [Work(request, 1 + len(draft), tuple(draft)) for request in (other, subject)]
        found.append(self._runner.forward(works).logits_RV[-OUTPUT:])
        return torch.cat(found)

    def _next(self, token: int) -> int:
        return (token * 5 + 3) % self._runner.vocab

    def _sequence(self, number: int, length: int) -> Request:
        vocab, size = self._runner.vocab, self._runner.kv.block_size
        tokens = [(1 + 7 * number + 3 * i * i) % vocab for i in range(length)]
        request = Request(
            number, number, tokens, Sampling(), max_length=length + OUTPUT + len(CHUNK_SIZES)
        )
        needed = -(-request.max_length // size)
        request.blocks.tables = [
            array("i", [next(self._blocks) for _ in range(needed)]) for _ in self._runner.kv.groups
        ]
        if self._runner.states is not None:
            request.blocks.state_slot = next(self._slots)
            self._runner.states.scrub(request.blocks.state_slot)
        return request

    def _step(self, subject: Request, size: int, batch: list[Request]) -> Tensor:
        """Compute `size` tokens of the subject and all that is left of each other sequence.

        Returns the subject's logits, `[1, V]`, or `[0, V]` if it does not draw.
        """
        sizes = {request: request.num_uncomputed for request in batch} | {subject: size}
        works = sorted((Work(r, n) for r, n in sizes.items()), key=lambda work: work.num_tokens > 1)
        logits_RV = self._runner.forward(works).logits_RV
        drawing = [work.request for work in works if work.draws]
        for request, num_tokens in sizes.items():
            request.num_computed += num_tokens
            if request in drawing:
                request.tokens.append(self._next(request.tokens[-1]))
        return logits_RV[drawing.index(subject)][None] if subject in drawing else logits_RV[:0]
