"""Define what an engine is for its host: token ids in, token ids out, and what it is able to do.

An engine knows nothing of the bus. `generate` is an async generator per request; closing it cancels
the request, and reading it slowly is the engine's backpressure.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from motet_shared.messages import Generate, ScoredToken, TokenLogprob

from .pictures import Picture

ALL_GRAMMARS = frozenset({"json_schema", "regex", "choice", "grammar"})
ALL_SAMPLING = frozenset(
    {
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "min_tokens",
        "ignore_eos",
    }
)


@dataclass(frozen=True, kw_only=True)
class Features:
    """Declare what an engine supports; the host refuses requests for anything else.

    sampling: fields of `messages.Sampling` besides temperature, top_p and max_tokens.
    grammars: kinds of `messages.Grammar`. frames: a grammar may have a frame, in Lark's syntax.
    continues: a reply may begin with tokens of another instance.
    continues_grammars: the same for replies that a grammar constrains.
    logprobs: maximum number of alternatives per token; -1: no log-probabilities.
    prompt_logprobs: log-probabilities of prompts are returned, with as many alternatives.
    raw_prompts: prompts may be other than chats.
    pictures: what is supported for chats with pictures; None: they are refused.
    """

    sampling: frozenset[str] = ALL_SAMPLING
    grammars: frozenset[str] = ALL_GRAMMARS
    frames: bool = False
    continues: bool = True
    continues_grammars: bool = False
    logprobs: int = 20
    prompt_logprobs: bool = False
    raw_prompts: bool = True
    pictures: Features | None = None


@dataclass(slots=True)
class StepOutput:
    """Hold the tokens that a request has got at once; the last output has `finish`.

    cached_tokens: of the prompt, from the engine's prefix cache; -1: not reported. scores: of all
        prompt tokens but the first, with the first output of a request that asks for them.
    prompt_tokens: of the prompt with its pictures; 0: not reported.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish: str = ""  # "stop" or "length"
    cached_tokens: int = -1
    scores: list[ScoredToken] | None = None
    prompt_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Served:
    """Describe what an engine serves, once it is up.

    context: most tokens of prompt and reply; 0: not reported.
    adapters: names of LoRA adapters that may be requested in place of the model.
    """

    context: int = 0
    adapters: tuple[str, ...] = ()


class Engine(Protocol):
    """Generate tokens for many requests at a time; all methods run on the event loop."""

    @property
    def features(self) -> Features:
        """Return what the engine is able to do; known once it has started."""
        ...

    async def start(self, on_health: Callable[[bool], None], on_crash: CrashHandler) -> Served:
        """Start the engine, or wait for its server; return what it serves.

        on_health: called with False when the engine stops answering, with True when it is back.
        on_crash: called with the error that ended the engine for good. Raises ConfigError.
        """
        ...

    def generate(
        self,
        key: str,
        request: Generate,
        expires: float | None,
        pictures: Sequence[Picture] = (),
    ) -> AsyncGenerator[StepOutput, None]:
        """Generate the reply from the end of `request.output` on.

        `expires`: deadline on the clock of `time.monotonic()`. `pictures`: those of `request.chat`,
        for which the prompt has one mark each. Raises MotetError; Unavailable where another instance
        may continue.
        """
        ...

    def load(self) -> dict[str, float]:
        """Return what the engine reports of its load, in the names of decode's heartbeats."""
        ...

    def describe(self) -> dict[str, object]:
        """Return details for `$SRV.STATS`, such as the URL of the server and the route in use."""
        ...

    async def close(self) -> None: ...


CrashHandler = Callable[[BaseException], None]
