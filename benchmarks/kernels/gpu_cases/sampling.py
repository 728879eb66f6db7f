"""Define cases of sampling: draws, grammar masks, verified drafts, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from motet_kernels.sampling import sampling, speculation
from motet_kernels.sampling.choice import Choice

from .case import Case, Run, Sizes, nbytes_of, random

DRAFTED = 5  # tokens
LIKELY = 20  # tokens whose log-probabilities are returned


def draws(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    yield _drawn(sizes, device, "greedy", Choice(0.0))
    yield _drawn(sizes, device, "all tokens", Choice(1.0))
    yield _masked(sizes, device)


def filtered_draws(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    yield _drawn(sizes, device, "top-k 50, top-p 0.9", Choice(1.0, top_k=50, top_p=0.9))
    yield _drawn(sizes, device, "top-p 0.9", Choice(1.0, top_p=0.9))


def _drawn(sizes: Sizes, device: torch.device, name: str, choice: Choice) -> Case:
    logits_RV = random(device, sizes.draws, sizes.vocab)
    choices = [choice._replace(seed=row) for row in range(sizes.draws)]
    peers: dict[str, Run] = {"twin": partial(sampling.draw_torch, logits_RV, choices)}
    return Case(
        f"draw, {name}", partial(sampling.draw, logits_RV, choices), peers, nbytes_of(logits_RV)
    )


def _masked(sizes: Sizes, device: torch.device) -> Case:
    logits_RV = random(device, sizes.draws, sizes.vocab)
    bits_RW = torch.full(
        (sizes.draws, -(-sizes.vocab // 32)), 0x5F5F5F5F, dtype=torch.int32, device=device
    )
    peers: dict[str, Run] = {"twin": partial(sampling.forbid_torch, logits_RV, bits_RW)}
    moved = nbytes_of(logits_RV, bits_RW, logits_RV)
    return Case("grammar masks", partial(sampling.forbid, logits_RV, bits_RW), peers, moved)


def agreements(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    drafts = [[row] * DRAFTED for row in range(sizes.draws)]
    ids_R = torch.arange(sizes.draws * (DRAFTED + 1), device=device) // (DRAFTED + 1)
    guesses = torch.tensor(drafts, device=device)
    starts = torch.arange(sizes.draws, device=device) * (DRAFTED + 1)
    peers: dict[str, Run] = {"twin": partial(speculation.agreement_torch, ids_R, guesses, starts)}
    moved = nbytes_of(ids_R, guesses, starts)
    yield Case(
        f"{DRAFTED} guesses checked", partial(speculation.agreement, ids_R, drafts), peers, moved
    )


def logprobs(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    logits_RV, rows = random(device, sizes.draws, sizes.vocab), range(sizes.draws)
    ids_R = logits_RV.argmax(-1)
    args = (logits_RV, rows, ids_R, LIKELY)
    peers: dict[str, Run] = {"twin": partial(sampling.logprobs_torch, *args)}
    yield Case(
        f"{LIKELY} likely tokens", partial(sampling.logprobs, *args), peers, nbytes_of(logits_RV)
    )
