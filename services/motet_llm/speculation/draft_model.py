"""Draft with a smaller model of the same vocabulary, one token at a time for all requests at once.

It draws with the sampling options and the noise of the request, so that under sampling it guesses
the token which the same noise would give a similar model, and not only the likeliest one. (Common
random numbers; Daliri et al. 2024, "Coupling without Communication and Drafter-Invariant
Speculative Decoding": two distributions that differ by D in total variation agree with probability
of at least (1 - D)/(1 + D).)

The draft model has a KV cache in a block pool of its own. A request for which that pool has no room
is decoded without drafts.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from motet_llm.cache.block_pool import BlockPool
from motet_llm.cache.block_tables import BlockTables
from motet_llm.config import EngineConfig
from motet_llm.engine.model_runner import Forward, ModelRunner
from motet_llm.engine.request import Request
from motet_llm.engine.sampler import Sampled, choose
from motet_llm.grammar.token_mask import TokenMask
from motet_llm.scheduling.work import Work
from motet_llm.weights.checkpoint import exact_range, load_config
from motet_shared.errors import ConfigError, InternalError

from .draft_request import DraftRequest

CATCH_UP = 32  # catch-up tokens per step: running streams wait for them
BEHIND = 2  # tokens left to compute, at most, after a draft that was accepted entirely


class DraftModel:
    """Draft for an engine whose model is run by `target`.

    Raises ConfigError if the draft model cannot draft for that model.
    """

    needs_model = True
    catch_up, behind = CATCH_UP, BEHIND

    def __init__(self, config: EngineConfig, target: ModelRunner):
        self.runner = self._load(config, target)
        if self.runner.states is not None:
            raise ConfigError(
                f"speculate={config.speculate!r}: {self.runner.model_type} has recurrent layers, whose state cannot be "
                "taken back behind a wrong token; give a draft model without any"
            )
        self.runner.resize(target.kv.num_blocks // len(target.kv.groups))
        self._pool = BlockPool(self.runner.kv.num_blocks, config.block_size)
        self._tables = BlockTables(
            self._pool, self.runner.kv.layout, step_tokens=config.token_budget
        )
        self._longest = min(self.runner.context, self._tables.longest)
        self._draft_requests: OrderedDict[Request, DraftRequest] = (
            OrderedDict()
        )  # least recently used first
        self.catch_up_tokens = 0

    def _load(self, config: EngineConfig, target: ModelRunner) -> ModelRunner:
        return load(config, target, ModelRunner)

    def _new_draft_request(self, request: Request) -> DraftRequest:
        return DraftRequest(request)

    def catch_up_for(self, request: Request) -> int:
        """Return the catch-up tokens of a request: those to compute before its first draft token.

        0 if they are no more than one step leaves behind (`behind`).
        """
        draft_request = self._draft_requests.get(request)
        if draft_request is None:
            count = self._num_catch_up(request)
        else:
            count = draft_request.num_confirmed - draft_request.num_computed
        return count if count > self.behind else 0

    def _num_catch_up(self, request: Request) -> int:
        """Return the number of tokens that a new draft request of `request` begins with."""
        return len(request.tokens)

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> dict[Request, list[int]]:
        """Return drafts of up to the wanted number of tokens for each request.

        A request that is new gets none until its tokens are computed, over several steps.
        """
        busy = {request for request, _ in wanted}
        draft_requests = [
            draft_request
            for request, count in wanted
            if (draft_request := self._prepare(request, count, busy))
        ]
        works = self._first_works(draft_requests)
        while works:
            works = [Work(draft_request, 1) for draft_request in self._step(works)]
        return {
            draft_request.target: draft_request.draft
            for draft_request in draft_requests
            if draft_request.draft
        }

    def _prepare(
        self, request: Request, wanted: int, busy: Collection[Request]
    ) -> DraftRequest | None:
        """Return the draft request of a request, with room for its draft; None without room."""
        wanted = min(wanted, self._longest - len(request.tokens))
        if wanted <= 0:
            return None
        if (draft_request := self._draft_requests.get(request)) is None:
            draft_request = self._draft_requests[request] = self._new_draft_request(request)
            self._tables.open(draft_request)
        self._draft_requests.move_to_end(request)
        draft_request.synchronize(wanted)
        self._tables.cut(draft_request)
        self._tables.trim(draft_request)
        if self._make_room(draft_request, draft_request.num_known + wanted - 1, busy):
            return draft_request
        self._evict(request)
        return None

    def _make_room(self, draft_request: DraftRequest, end: int, busy: Collection[Request]) -> bool:
        """Reserve blocks for tokens up to `end`, evicting idle draft requests if needed.

        Returns False if there are not enough blocks.
        """
        idle = [request for request in self._draft_requests if request not in busy]
        while self._tables.missing(draft_request, end) > self._tables.num_free:
            if not idle:
                return False
            self._evict(idle.pop(0))
        self._tables.grow(draft_request, end)
        return True

    def _first_works(self, draft_requests: Iterable[DraftRequest]) -> list[Work]:
        """Return the work before the first draft tokens, at most `catch_up` tokens per step."""
        self.catch_up_tokens, works = 0, []
        for draft_request in draft_requests:
            count = draft_request.num_uncomputed
            if count > self.behind:
                count = min(count, self.catch_up - self.catch_up_tokens)
                self.catch_up_tokens += count
            if count:
                works.append(Work(draft_request, count))
        return sorted(works, key=lambda work: work.num_tokens > 1)

    def _step(self, works: list[Work]) -> list[DraftRequest]:
        """Compute one step and return the draft requests whose drafts continue."""
        forward = self.runner.forward(works)
        drawing: list[Any] = [work.request for work in works if work.draws]
        tokens: list[int] = []
        if drawing:
            mask = TokenMask(drawing, self.runner.vocab, self.runner.device)
            mask.compute()
            tokens = choose(forward.logits_RV, drawing, mask).tolist()
            self._keep_outputs(drawing, forward)
        for work, num_finite in zip(works, forward.num_finite, strict=True):
            work.request.num_computed += work.num_tokens
            if num_finite < work.num_tokens:
                self._discard(work.request)
        drawn = (
            (s, token)
            for s, token in zip(drawing, tokens, strict=True)
            if s.target in self._draft_requests
        )
        return [
            draft_request
            for draft_request, token in drawn
            if token >= 0 and self.extend(draft_request, token)
        ]

    def _keep_outputs(self, drawing: Sequence[Any], forward: Forward) -> None:
        """Keep what a subclass needs of a step for its drawing requests; by default nothing."""

    def extend(self, draft_request: DraftRequest, token: int) -> bool:
        """Append the drawn token to the draft; return True if the draft continues."""
        return draft_request.extend(token)

    def _discard(self, draft_request: Any) -> None:
        """Drop a draft request whose computation gave NaN or infinity, and clear its blocks."""
        self.runner.scrub(self._tables.private_blocks(draft_request))
        self._evict(draft_request.target)

    def observe(self, works: Sequence[Work], forward: Forward, sampled: Sampled) -> None:
        """Ignore the target model's step: this drafter does not use it."""

    def forget(self, request: Request) -> None:
        """Free what is kept for a request that has ended."""
        self._evict(request)

    def _evict(self, request: Request) -> None:
        if (draft_request := self._draft_requests.pop(request, None)) is not None:
            self._tables.close(draft_request)

    def check_integrity(self, requests: set[Request]) -> None:
        """Raise InternalError unless blocks belong to draft requests, and these to `requests`."""
        if not self._draft_requests.keys() <= requests:
            raise InternalError(
                f"the draft model keeps {len(self._draft_requests.keys() - requests)} requests that are gone"
            )
        self._tables.check_integrity(self._draft_requests.values())


# -------------------------------------------------------------------------------------------------------------- loading
def load(
    config: EngineConfig, target: ModelRunner, runner: Callable[[EngineConfig], ModelRunner]
) -> ModelRunner:
    """Return a runner of the draft model's folder, with the engine's settings and no caches.

    Its KV cache has one block until it is resized. Raises ConfigError for a model that cannot be
    loaded or has another vocabulary.
    """
    try:
        own = load_config(Path(config.speculate))
        _check_vocabulary(config, own.vocab_size, target.vocab)
        context = target.context if exact_range(own) is None else 0
        other: dict[str, Any] = {
            "speculate": "off",
            "context": context,
            "num_blocks": 1,
            "prefix_cache": False,
        }
        without: dict[str, Any] = {
            "host_cache": 0,
            "disk_cache": 0,
            "adapters": (),
            "adapter_folder": "",
            "cuda_graphs": False,
        }
        without["attention_budget"] = 0  # the draft model's own KV cache is small
        without["long_context"] = (
            False  # no drafts for sequences that exceed the draft model's own cache
        )
        return runner(replace(config, model=config.speculate, **other, **without))
    except ConfigError as error:
        setting = f"speculate={config.speculate!r}"
        if setting in error.message:
            raise
        raise ConfigError(f"{setting}: {error.message}") from error


def _check_vocabulary(config: EngineConfig, own: int, target: int) -> None:
    """Raise ConfigError if the vocabularies differ in size, or in spelling where it is known."""
    if own != target:
        raise ConfigError(
            f"speculate={config.speculate!r}: has a vocabulary of {own} tokens, the model one of {target}; "
            "give a draft model of the same family"
        )
    target_spelling, own_spelling = _spelling(Path(config.model)), _spelling(Path(config.speculate))
    if None not in (target_spelling, own_spelling) and target_spelling != own_spelling:
        raise ConfigError(
            f"speculate={config.speculate!r}: its tokenizer.json spells other tokens than that of the model; "
            "give a draft model of the same family"
        )


def _spelling(folder: Path) -> Any:
    """Return the vocabulary and added tokens of tokenizer.json; None if it cannot be read."""
    try:
        document = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        return document["model"]["vocab"], [
            (token["id"], token["content"]) for token in document["added_tokens"]
        ]
    except (OSError, ValueError, LookupError, TypeError):
        return None
