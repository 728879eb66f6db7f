"""Drafts from a smaller model of the same vocabulary: its own answer, a token at a time, for all requests at once.

It draws with the options and the noise of the request, so that under sampling it guesses the token that the same noise
would give a model like it, and not only the likeliest one. (Common random numbers; Daliri et al. 2024, "Coupling
without Communication and Drafter-Invariant Speculative Decoding": two distributions that differ by D in total variation
agree with probability of at least (1 - D)/(1 + D).)

It keeps keys and values of its own in a pool of its own. Whoever finds no room there goes without drafts.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from motet_shared.errors import ConfigError, InternalError

from .block_pool import BlockPool
from .block_tables import BlockTables
from .checkpoint import exact_range, load_config
from .config import EngineConfig
from .model_runner import Forward, ModelRunner
from .request import Request
from .sampler import Sampled, choose
from .scheduler import Work
from .shadow import Shadow
from .token_mask import TokenMask

CATCH_UP = 32  # tokens of prompts that are computed in one step: streams wait for them
BEHIND = 2  # tokens, at the most, of a request whose last draft was right to its end


class DraftModel:
    """Of an engine whose model is `target`'s. Raises ConfigError for a model that cannot draft for it."""

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
        self._tables = BlockTables(self._pool, self.runner.kv.layout, step_tokens=config.token_budget)
        self._longest = min(self.runner.context, self._tables.longest)
        self._shadows: OrderedDict[Request, Shadow] = OrderedDict()  # those used last are at the end
        self.overdue = 0

    def _load(self, config: EngineConfig, target: ModelRunner) -> ModelRunner:
        return load(config, target, ModelRunner)

    def _shadow(self, request: Request) -> Shadow:
        return Shadow(request)

    def due(self, request: Request) -> int:
        """Tokens that are to be computed before the first guess, where that is more than follows from one step."""
        shadow = self._shadows.get(request)
        count = self._tokens_of(request) if shadow is None else shadow.num_theirs - shadow.num_computed
        return count if count > self.behind else 0

    def _tokens_of(self, request: Request) -> int:
        """That a shadow of it would begin with."""
        return len(request.tokens)

    def propose(self, wanted: Sequence[tuple[Request, int]]) -> dict[Request, list[int]]:
        """Up to so many tokens of each request; of one that is new, none until its tokens are computed."""
        busy = {request for request, _ in wanted}
        shadows = [shadow for request, count in wanted if (shadow := self._follow(request, count, busy))]
        works = self._first_works(shadows)
        while works:
            works = [Work(shadow, 1) for shadow in self._step(works)]
        return {shadow.real: shadow.draft for shadow in shadows if shadow.draft}

    def _follow(self, request: Request, wanted: int, busy: Collection[Request]) -> Shadow | None:
        """The request's shadow with room for its draft; None if there is none."""
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

    def _make_room(self, shadow: Shadow, end: int, busy: Collection[Request]) -> bool:
        """Blocks for tokens up to `end`, from those who draft nothing now if need be. Whether there are enough."""
        idle = [request for request in self._shadows if request not in busy]
        while self._tables.missing(shadow, end) > self._tables.num_free:
            if not idle:
                return False
            self._evict(idle.pop(0))
        self._tables.grow(shadow, end)
        return True

    def _first_works(self, shadows: Iterable[Shadow]) -> list[Work]:
        """What is left to compute before the first guesses, as far as it is for this step."""
        self.overdue, works = 0, []
        for shadow in shadows:
            due = shadow.num_uncomputed
            if due > self.behind:
                due = min(due, self.catch_up - self.overdue)
                self.overdue += due
            if due:
                works.append(Work(shadow, due))
        return sorted(works, key=lambda work: work.num_tokens > 1)

    def _step(self, works: list[Work]) -> list[Shadow]:
        """Compute; those whose drafts go on."""
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
        kept = ((s, token) for s, token in zip(drawing, tokens, strict=True) if s.real in self._shadows)
        return [shadow for shadow, token in kept if token >= 0 and self.guess(shadow, token)]

    def _note(self, drawing: Sequence[Any], forward: Forward) -> None:
        """What a shadow that draws is to remember of a step."""

    def guess(self, shadow: Shadow, token: int) -> bool:
        """Take what the model says comes next; whether the draft is to go on."""
        return shadow.guess(token)

    def _lose(self, shadow: Any) -> None:
        """It has computed NaN, and begins again."""
        self.runner.scrub(self._tables.private_blocks(shadow))
        self._evict(shadow.real)

    def observe(self, works: Sequence[Work], forward: Forward, sampled: Sampled) -> None:
        """What the other model computes says nothing here."""

    def forget(self, request: Request) -> None:
        """It has ended."""
        self._evict(request)

    def _evict(self, request: Request) -> None:
        if (shadow := self._shadows.pop(request, None)) is not None:
            self._tables.close(shadow)

    def check_integrity(self, requests: set[Request]) -> None:
        """Raise InternalError unless blocks are held by shadows, and shadows by requests that there are."""
        if not self._shadows.keys() <= requests:
            raise InternalError(f"the draft model keeps {len(self._shadows.keys() - requests)} requests that are gone")
        self._tables.check_integrity(self._shadows.values())


# -------------------------------------------------------------------------------------------------------------- loading
def load(config: EngineConfig, target: ModelRunner, runner: Callable[[EngineConfig], ModelRunner]) -> ModelRunner:
    """The runner of the folder's model, with the settings of the engine's own and next to no cache."""
    try:
        own = load_config(Path(config.speculate))
        _check_vocabulary(config, own.vocab_size, target.vocab)
        context = target.context if exact_range(own) is None else 0
        other: dict[str, Any] = {"speculate": "off", "context": context, "num_blocks": 1, "prefix_cache": False}
        without: dict[str, Any] = {"host_cache": 0, "disk_cache": 0, "adapters": (), "adapter_folder": ""}
        without["attention_budget"] = 0  # its own keys and values are few
        without["long_context"] = False  # it guesses nothing for sequences that its own cache does not hold
        return runner(replace(config, model=config.speculate, **other, **without))
    except ConfigError as error:
        told = f"speculate={config.speculate!r}"
        raise error if told in error.message else ConfigError(f"{told}: {error.message}") from error


def _check_vocabulary(config: EngineConfig, own: int, target: int) -> None:
    """Raise ConfigError for a model whose tokens are others: by number, or by spelling where that is known."""
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
    """What a folder's tokens are; None if it does not say so, or in a way that only its tokenizer reads."""
    try:
        told = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        return told["model"]["vocab"], [(token["id"], token["content"]) for token in told["added_tokens"]]
    except (OSError, ValueError, LookupError, TypeError):
        return None
