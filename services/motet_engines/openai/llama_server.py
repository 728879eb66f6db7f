"""Put requests as token ids to llama-server's own /completion, which returns ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from motet_engines.continuation import remaining, seed_of
from motet_engines.engine import ALL_SAMPLING, Features, StepOutput
from motet_engines.pictures import Picture
from motet_shared.errors import UnsupportedParameter
from motet_shared.messages import Generate, Grammar, Sampling, TokenLogprob

from .route import Ending, cut_at_stop, read_event
from .text_tokens import TextTokens

_SEEDS = 2**32 - 1  # llama.cpp draws a random seed for the last 32-bit number


class _Likely(msgspec.Struct):
    id: int
    logprob: float = 0.0
    top_logprobs: list[_Likely] = []


class _Event(msgspec.Struct):
    content: str = ""
    tokens: list[int] = []
    stop: bool = False
    stop_type: str = ""
    completion_probabilities: list[_Likely] = []
    timings: dict[str, Any] = {}
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class LlamaServerRoute:
    """Send prompts as ids to llama-server; ids come back."""

    name = "ids"
    path = "//completion"

    def __init__(self, text: TextTokens):
        self._text = text
        self.features = Features(
            sampling=ALL_SAMPLING - {"min_tokens"},
            grammars=frozenset({"json_schema", "choice", "grammar"}),
        )

    def body(self, request: Generate, pictures: Sequence[Picture] = ()) -> dict[str, Any]:
        sampling = request.sampling
        body: dict[str, Any] = {
            "prompt": [*request.prompt, *request.output],
            "n_predict": remaining(request),
            "stream": True,
            "return_tokens": True,
            "cache_prompt": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "repeat_penalty": sampling.repetition_penalty,
            # All of prompt and reply: penalties here are of both, as everywhere.
            "repeat_last_n": len(request.prompt) + sampling.max_tokens,
            "ignore_eos": sampling.ignore_eos,
            "logit_bias": [[number, bias] for number, bias in sampling.logit_bias.items()],
            "seed": seed_of(request) % _SEEDS,
        }
        if sampling.logprobs >= 0:
            body["n_probs"] = max(1, sampling.logprobs)
        if request.grammar is not None:
            body |= grammar_field(request.grammar)
        return body

    def reply(self, request: Generate) -> LlamaServerReply:
        return LlamaServerReply(request.sampling, self._text)


class LlamaServerReply:
    """Read one reply.

    Of a character that is spelled by several tokens, the server sends the last token's id and all of
    the text: such text is spelled anew.
    """

    def __init__(self, sampling: Sampling, text: TextTokens):
        self._stops = frozenset(sampling.stop_token_ids)
        self._logprobs = sampling.logprobs
        self._text = text
        self._ending = Ending()

    def feed(self, data: bytes) -> StepOutput | None:
        event = read_event(_decode, data)
        if event.stop:
            finish = "length" if event.stop_type == "limit" else "stop"
            cached = event.timings.get("cache_n")
            usage = {"prompt_tokens_details": {"cached_tokens": cached}}
            self._ending.note(finish, usage)
        ids, logprobs = event.tokens, None
        if event.content and len(event.content.encode()) > len(self._text.data_of(ids)):
            ids = self._text.spell(event.content)
        if not ids:
            return None
        if self._logprobs >= 0:
            logprobs = _logprobs(ids, event.completion_probabilities, self._logprobs)
        kept = cut_at_stop(ids, self._stops)
        finish = "stop" if ids[kept - 1] in self._stops else ""
        return StepOutput(ids[:kept], logprobs and logprobs[:kept], finish=finish)

    def end(self) -> StepOutput:
        return self._ending.output()


def _logprobs(ids: list[int], found: list[_Likely], most: int) -> list[TokenLogprob]:
    """Return the log-probabilities of ids; of those that were spelled anew, that of the last one."""
    last = found[-1] if found else _Likely(ids[-1])
    entries = [TokenLogprob(number, 0.0) for number in ids[:-1]]
    top = [(one.id, one.logprob) for one in last.top_logprobs[:most]]
    return [*entries, TokenLogprob(ids[-1], last.logprob, top)]


def grammar_field(grammar: Grammar) -> dict[str, Any]:
    """Return llama-server's field of a grammar. Raises UnsupportedParameter for Lark's syntax."""
    if grammar.kind == "json_schema":
        return {"json_schema": json.loads(grammar.text)}
    if grammar.kind == "choice":
        words = " | ".join(json.dumps(word) for word in json.loads(grammar.text))
        return {"grammar": f"root ::= {words}"}
    if "::=" not in grammar.text:
        raise UnsupportedParameter(
            f"`{grammar.param or 'grammar'}`: llama.cpp has grammars in GBNF only; give"
            " `root ::= …`",
            param=grammar.param or None,
        )
    return {"grammar": grammar.text}
