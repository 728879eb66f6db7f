"""Translate requests to vLLM's sampling parameters, and its outputs to the wire's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from motet_engines.continuation import remaining, scores_prompt, seed_of
from motet_engines.engine import StepOutput
from motet_engines.grammars import as_lark, schema_of, with_token_ids
from motet_shared.errors import BadRequest, Unavailable
from motet_shared.messages import Generate, Grammar, ScoredToken, TokenLogprob
from motet_shared.text.grammars import guided_schema

from .library import Library

FINISHES = {"stop": "stop", "repetition": "stop", "length": "length"}


def sampling_params(library: Library, request: Generate, tokens: Mapping[str, int]) -> Any:
    """Return the parameters of the rest of a reply, whose output comes as differences.

    tokens: ids of the added tokens that grammars may name.
    """
    sampling, grammar = request.sampling, request.grammar
    return library.sampling_params(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias or None,
        seed=seed_of(request),
        max_tokens=max(
            1, remaining(request)
        ),  # vLLM draws a token also where only scores are asked for
        min_tokens=max(0, min(sampling.min_tokens - len(request.output), remaining(request))),
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logprobs=None if sampling.logprobs < 0 else sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs if scores_prompt(request) else None,
        detokenize=False,
        output_kind=library.delta,
        structured_outputs=None if grammar is None else structured(library, grammar, tokens),
    )


def structured(library: Library, grammar: Grammar, tokens: Mapping[str, int]) -> Any:
    """Return vLLM's form of a grammar. Raises BadRequest for one that cannot be written."""
    if grammar.frame or (grammar.kind == "grammar" and "::=" not in grammar.text):
        return library.structured_outputs(grammar=with_token_ids(as_lark(grammar), tokens))
    if grammar.kind == "choice":
        return library.structured_outputs(choice=json.loads(grammar.text))
    if grammar.kind == "json_schema":
        return library.structured_outputs(json=_guided(grammar))
    return library.structured_outputs(**{grammar.kind: grammar.text})


def _guided(grammar: Grammar) -> str:
    try:
        return guided_schema(schema_of(grammar))
    except ValueError as error:
        param = grammar.param or "json_schema"
        raise BadRequest(f"`{param}`: {error}; correct it", param=param) from None


def step_output(found: Any, request: Generate) -> StepOutput:
    """Convert a vLLM `RequestOutput`, which holds new tokens alone, to a `StepOutput`.

    Raises Unavailable for a finish reason other than those of FINISHES.
    """
    (completion,) = found.outputs
    logprobs = request.sampling.logprobs
    ids = list(completion.token_ids)[: remaining(request)]
    reason = completion.finish_reason or ""
    if reason and reason not in FINISHES:
        raise Unavailable(f"vllm broke a reply off: {reason}")
    return StepOutput(
        ids,
        token_logprobs(ids, completion.logprobs or (), logprobs) if logprobs >= 0 and ids else None,
        scores=prompt_scores(request, found.prompt_logprobs),
        finish=FINISHES.get(reason, ""),
        cached_tokens=-1 if found.num_cached_tokens is None else found.num_cached_tokens,
    )


def prompt_scores(
    request: Generate, found: Sequence[Mapping[int, Any] | None] | None
) -> list[ScoredToken] | None:
    """Return the scores of all prompt tokens but the first; None if the output has none.

    found: by prompt token its own log-probability and those of the likeliest ones, by id.
    """
    if not found or not scores_prompt(request):
        return None
    scores = []
    for number, ranks in zip(request.prompt[1:], found[1:], strict=True):
        assert ranks is not None
        own, ranked = ranks[number], sorted(ranks.items(), key=lambda entry: entry[1].rank)
        top = [(one, value.logprob) for one, value in ranked[: request.sampling.prompt_logprobs]]
        scores.append(ScoredToken(number, own.logprob, own.rank, top))
    return scores


def token_logprobs(
    ids: list[int], found: Iterable[Mapping[int, Any]], most: int
) -> list[TokenLogprob]:
    """Return the log-probabilities of ids, with at most `most` alternatives each, likeliest first."""
    entries = []
    for number, ranks in zip(ids, found, strict=True):
        ranked = sorted(ranks.items(), key=lambda entry: entry[1].rank)
        top = [(one, value.logprob) for one, value in ranked[:most]]
        entries.append(TokenLogprob(number, ranks[number].logprob, top))
    return entries
