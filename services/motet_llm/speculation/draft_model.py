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
from motet_llm.scheduling.scheduler import Work
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
        self._shadows: OrderedDict[Request, DraftRequest] = (
            OrderedDict()
        )  # least recently used first
        self.overdue = 0

    def _load(self, config: EngineConfig, target: ModelRunner) -> ModelRunner:
        return load(config, target, ModelRunner)

    def _shadow(self, request: Request) -> DraftRequest:
        return DraftRequest(request)

    def due(self, request: Request) -> int:
        """Return the catch-up tokens of a request: those to compute before its first draft token.

        0 if they are no more than one step leaves behind (`behind`).
        """
        shadow = self._shadows.get(request)
        count = (
            self._tokens_of(request) if shadow is None else shadow.num_theirs - shadow.num_computed
        )
        return count if count > self.behind else 0

    def _tokens_of(self, request: Request) -> int:
        """Return the number of tokens that a new draft request of `request` begins with."""
        return len(request.tokens)

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> dict[Request, list[int]]:
        """Return drafts of up to the wanted number of tokens for each request.

        A request that is new gets none until its tokens are computed, over several steps.
        """
        busy = {request for request, _ in wanted}
        shadows = [
            shadow for request, count in wanted if (shadow := self._follow(request, count, busy))
        ]
        works = self._first_works(shadows)
        while works:
            works = [Work(shadow, 1) for shadow in self._step(works)]
        return {shadow.real: shadow.draft for shadow in shadows if shadow.draft}

    def _follow(
        self, request: Request, wanted: int, busy: Collection[Request]
    ) -> DraftRequest | None:
        """Return the draft request of a request, with room for its draft; None without room."""
        wanted = min(wanted, self._longest - len(request.tokens))
        if wanted <= 0:
            return None
        if (shadow := self._shadows.get(request)) is None:
            shadow = self._shadows[request] = self._shadow(request)
            self._tables.open(shadow)
        self._shadows.move_to_end(request)
        shadow.follow(wanted)
        self._tables.cut(shadow)
        self._tables.trim(shadow)
        if self._make_room(shadow, shadow.known + wanted - 1, busy):
            return shadow
        self._evict(request)
        return None

    def _make_room(self, shadow: DraftRequest, end: int, busy: Collection[Request]) -> bool:
        """Reserve blocks for tokens up to `end`, evicting idle draft requests if needed.

        Returns False if there are not enough blocks.
        """
        idle = [request for request in self._shadows if request not in busy]
        while self._tables.missing(shadow, end) > self._tables.num_free:
            if not idle:
                return False
            self._evict(idle.pop(0))
        self._tables.grow(shadow, end)
        return True

    def _first_works(self, shadows: Iterable[DraftRequest]) -> list[Work]:
        """Return the work before the first draft tokens, at most `catch_up` tokens per step."""
        self.overdue, works = 0, []
        for shadow in shadows:
            due = shadow.num_uncomputed
            if due > self.behind:
                due = min(due, self.catch_up - self.overdue)
                self.overdue += due
            if due:
                works.append(Work(shadow, due))
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
            self._note(drawing, forward)
        for work, num_finite in zip(works, forward.num_finite, strict=True):
            work.request.num_computed += work.num_tokens
            if num_finite < work.num_tokens:
                self._lose(work.request)
        kept = (
            (s, token) for s, token in zip(drawing, tokens, strict=True) if s.real in self._shadows
        )
        return [shadow for shadow, token in kept if token >= 0 and self.guess(shadow, token)]

    def _note(self, drawing: Sequence[Any], forward: Forward) -> None:
        """Keep what a subclass needs of a step for its drawing requests; by default nothing."""

    def guess(self, shadow: DraftRequest, token: int) -> bool:
        """Append the drawn token to the draft; return True if the draft continues."""
        return shadow.guess(token)

    def _lose(self, shadow: Any) -> None:
        """Drop a draft request whose computation gave NaN or infinity, and clear its blocks."""
        self.runner.scrub(self._tables.private_blocks(shadow))
        self._evict(shadow.real)

    def observe(self, works: Sequence[Work], forward: Forward, sampled: Sampled) -> None:
        """Ignore the target model's step: this drafter does not use it."""

    def forget(self, request: Request) -> None:
        """Free what is kept for a request that has ended."""
        self._evict(request)

    def _evict(self, request: Request) -> None:
        if (shadow := self._shadows.pop(request, None)) is not None:
            self._tables.close(shadow)

    def check_integrity(self, requests: set[Request]) -> None:
        """Raise InternalError unless blocks belong to draft requests, and these to `requests`."""
        if not self._shadows.keys() <= requests:
            raise InternalError(
                f"the draft model keeps {len(self._shadows.keys() - requests)} requests that are gone"
            )
        self._tables.check_integrity(self._shadows.values())


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
        }
        without["attention_budget"] = 0  # the draft model's own KV cache is small
        without["long_context"] = (
            False  # no drafts for sequences that exceed the draft model's own cache
        )
        return runner(replace(config, model=config.speculate, **other, **without))
    except ConfigError as error:
        told = f"speculate={config.speculate!r}"
        raise error if told in error.message else ConfigError(f"{told}: {error.message}") from error


def _check_vocabulary(config: EngineConfig, own: int, target: int) -> None:
    """Raise ConfigError if the vocabularies differ in size, or in spelling where it is known."""
    if own != target:
        raise ConfigError(
            f"speculate={config.speculate!r}: has a vocabulary of {own} tokens, the model one of {target}; "
            "give a draft model of the same family"
        )
    theirs, ours = _spelling(Path(config.model)), _spelling(Path(config.speculate))
    if theirs is not None and ours is not None and theirs != ours:
        raise ConfigError(
            f"speculate={config.speculate!r}: its tokenizer.json spells other tokens than that of the model; "
            "give a draft model of the same family"
        )


def _spelling(folder: Path) -> Any:
    """Return the vocabulary and added tokens of tokenizer.json; None if it cannot be read."""
    try:
        told = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        return told["model"]["vocab"], [
            (token["id"], token["content"]) for token in told["added_tokens"]
        ]
    except (OSError, ValueError, LookupError, TypeError):
        return None
