"""Turn the arguments of `Engine.add` into a request, or refuse them."""

from __future__ import annotations

import time

from motet_llm.cache.block_tables import BlockTables
from motet_llm.cache.prefix_cache import PrefixCache
from motet_llm.cache.spill import Spill
from motet_llm.config import EngineConfig
from motet_llm.models.image_embeddings import place
from motet_llm.scheduling.scheduler import Scheduler
from motet_shared.errors import ContextTooLong, DeadlineExceeded
from motet_shared.messages import Sampling

from . import validation
from .model_runner import ModelRunner
from .request import Key, Request, RequestOptions


class Admission:
    """Check requests against the model, the memory and the clock, before they are queued.

    context: most tokens of prompt and output together.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: ModelRunner,
        tables: BlockTables,
        scheduler: Scheduler,
        prefix_cache: PrefixCache | None,
        spill: Spill | None,
    ):
        self.context = min(runner.context, tables.longest)
        self._config = config
        self._runner = runner
        self._tables = tables
        self._scheduler = scheduler
        self._prefix_cache = prefix_cache
        self._spill = spill
        self._arrivals = 0

    def request(
        self, key: Key, prompt: list[int], sampling: Sampling, options: RequestOptions
    ) -> Request:
        """Return a new request. Raises BadRequest or ContextTooLong."""
        output = options.get("output", ())
        validation.check_sampling(sampling, self._runner.vocab, self._config.max_logprobs)
        validation.check_tokens(prompt, output, self._runner.vocab)
        self._check_fits(len(prompt) + len(output), whole="send_from" in options)
        eos_ids = frozenset() if sampling.ignore_eos else self._runner.eos_ids
        request = Request(
            key,
            self._arrivals,
            prompt,
            sampling,
            max_length=min(len(prompt) + sampling.max_tokens, self.context),
            stop_ids=frozenset(sampling.stop_token_ids) | eos_ids,
            output=output,
            credit=options.get("credit", 1 << 30),
            deadline=options.get("deadline"),
            priority=options.get("priority", 0),
            tenant=options.get("tenant", ""),
            images=place(prompt, options.get("images", ()), self._runner.image_shape),
            grammar_state=options.get("grammar_state"),
            adapter=options.get("adapter"),
        )
        self._arrivals += 1
        return request

    def _check_fits(self, num_tokens: int, *, whole: bool) -> None:
        """Raise ContextTooLong if `num_tokens` exceed the context.

        whole: all tokens must be in the pool, because they are transferred to another engine from
            there.
        """
        context = min(self.context, self._tables.longest_in_pool) if whole else self.context
        if num_tokens <= context:
            return
        if context < self._runner.context:
            pool = self._tables.pool
            more = (
                "" if self._spill is None or whole else f" and {self._spill.capacity} in its tiers"
            )
            limit = f"the KV cache holds {context} ({pool.num_blocks} blocks of {pool.block_size}{more})"
        else:
            limit = f"the context is {context}"
        raise ContextTooLong(
            f"the prompt has {num_tokens} tokens, {limit}; shorten it", param="prompt"
        )

    def check_deadline(self, request: Request) -> None:
        """Raise DeadlineExceeded if the deadline cannot be met even at the best pace measured."""
        if request.deadline is None:
            return
        num_prefill = self._scheduler.tokens_before(request)
        if self._prefix_cache is not None:
            match = self._prefix_cache.match(request.matchable, request.root)
            num_prefill -= len(match.nodes) * self._tables.block_size
        config = self._config
        per_step = 1 if config.speculate == "off" else 1 + config.draft_tokens
        num_steps = -(-request.sampling.min_tokens // per_step)
        least = self._scheduler.pace.at_least(num_prefill, num_steps)
        left = request.deadline - time.monotonic()
        if left < least:
            raise DeadlineExceeded(
                f"{max(left, 0):.3g} s are left, and the first token takes at least {least:.3g} s"
            )
