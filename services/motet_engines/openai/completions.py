"""Put requests as token ids to /v1/completions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from motet_engines.continuation import remaining, seed_of
from motet_engines.engine import Features, StepOutput
from motet_engines.grammars import as_lark, with_token_ids
from motet_engines.pictures import Picture
from motet_shared.errors import Unavailable
from motet_shared.messages import Generate, Grammar, Sampling, TokenLogprob

from .dialects import ServerDialect
from .route import Ending, cut_at_stop, read_event
from .text_tokens import TextTokens

_ID = "token_id:"


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Any = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


class CompletionsRoute:
    """Send prompts as ids; read ids where the server returns them, else spell its text (`text`)."""

    path = "/completions"

    def __init__(
        self,
        dialect: ServerDialect,
        model: str,
        text: TextTokens | None = None,
        tokens: Mapping[str, int] | None = None,
    ):
        self.name = "ids" if text is None else "text"
        self._dialect = dialect
        self._model = model
        self._text = text
        self._tokens = tokens or {}
        self.features = Features(
            sampling=dialect.sampling,
            grammars=dialect.grammars,
            frames=dialect.lark,
            logprobs=20 if dialect.logprob_ids and text is None else -1,
            prompt_logprobs=dialect.prompt_logprobs and text is None,
        )

    def body(self, request: Generate, pictures: Sequence[Picture] = ()) -> dict[str, Any]:
        sampling, dialect = request.sampling, self._dialect
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": [*request.prompt, *request.output],
            dialect.max_tokens: remaining(request),
            "stream": True,
            "stream_options": {"include_usage": True},
            **sampling_fields(sampling, dialect, len(request.output)),
            "seed": seed_of(request),
        }
        if self._text is None:
            body["return_token_ids"] = True
        if dialect.stop_ids and sampling.stop_token_ids:
            body["stop_token_ids"] = sampling.stop_token_ids
        if sampling.logprobs >= 0:
            body |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
        if request.grammar is not None:
            body |= grammar_fields(request.grammar, dialect, self._tokens)
        return body

    def reply(self, request: Generate) -> CompletionReply:
        return CompletionReply(request.sampling, self._text)


class CompletionReply:
    """Read one reply, up to the first end token that the server does not know of."""

    def __init__(self, sampling: Sampling, text: TextTokens | None):
        self._stops = frozenset(sampling.stop_token_ids)
        self._wants_logprobs = sampling.logprobs >= 0
        self._text = text
        self._ending = Ending()

    def feed(self, data: bytes) -> StepOutput | None:
        event = read_event(_decode, data)
        choice = event.choices[0] if event.choices else _Choice()
        self._ending.note(choice.finish_reason, event.usage)
        ids = self._ids(choice)
        if not ids:
            return None
        kept = cut_at_stop(ids, self._stops) if not self._stops.isdisjoint(ids) else len(ids)
        ended = bool(kept and ids[kept - 1] in self._stops)
        logprobs = None
        if self._wants_logprobs:
            logprobs = _logprobs(ids[:kept], choice.logprobs)
        return StepOutput(ids[:kept], logprobs, finish="stop" if ended else "")

    def _ids(self, choice: _Choice) -> list[int]:
        if self._text is not None:
            return self._text.spell(choice.text)
        if choice.token_ids is None and choice.text:
            raise Unavailable(
                "the engine's server returns no token ids any more; give engine_route=text"
            )
        return choice.token_ids or []

    def end(self) -> StepOutput:
        return self._ending.output()


def _logprobs(ids: list[int], found: _Logprobs | None) -> list[TokenLogprob]:
    """Return the log-probabilities of `ids`; alternatives are named by their ids."""
    if found is None or len(found.token_logprobs) < len(ids):
        raise Unavailable("the engine's server returns no log-probabilities, which were asked for")
    tops = found.top_logprobs or []
    entries = []
    for index, number in enumerate(ids):
        top = tops[index] if index < len(tops) else None
        ranked = sorted((top or {}).items(), key=lambda entry: -entry[1])
        entries.append(
            TokenLogprob(
                number,
                found.token_logprobs[index] or 0.0,
                [(int(name.removeprefix(_ID)), value) for name, value in ranked if _ID in name],
            )
        )
    return entries


def sampling_fields(sampling: Sampling, dialect: ServerDialect, done: int) -> dict[str, Any]:
    """Return the server's fields of the sampling; those that ask for nothing are left out.

    `done`: tokens of the reply so far.
    """
    given: dict[str, Any] = {
        "top_k": sampling.top_k or None,
        "min_p": sampling.min_p or None,
        "presence_penalty": sampling.presence_penalty or None,
        "frequency_penalty": sampling.frequency_penalty or None,
        "repetition_penalty": None
        if sampling.repetition_penalty == 1.0
        else sampling.repetition_penalty,
        "logit_bias": {str(number): bias for number, bias in sampling.logit_bias.items()} or None,
        "min_tokens": max(0, sampling.min_tokens - done) or None,
        "ignore_eos": sampling.ignore_eos or None,
    }
    fields = {
        dialect.names.get(name, name): value for name, value in given.items() if value is not None
    }
    return {"temperature": sampling.temperature, "top_p": sampling.top_p, **fields}


def response_format(grammar: Grammar) -> dict[str, Any]:
    """Return OpenAI's field of a JSON schema."""
    schema = {"name": "reply", "schema": json.loads(grammar.text), "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": schema}}


def grammar_fields(
    grammar: Grammar, dialect: ServerDialect, tokens: Mapping[str, int]
) -> dict[str, Any]:
    """Return the server's field of a grammar that the dialect has.

    tokens: ids of the added tokens that grammars may name (`grammars.with_token_ids`).
    """
    if not dialect.structured_outputs:
        return response_format(grammar)
    if grammar.frame or (tokens and grammar.kind == "grammar" and "::=" not in grammar.text):
        return {"structured_outputs": {"grammar": with_token_ids(as_lark(grammar), tokens)}}
    name = "json" if grammar.kind == "json_schema" else grammar.kind
    is_json = grammar.kind in ("json_schema", "choice")
    value = json.loads(grammar.text) if is_json else grammar.text
    return {"structured_outputs": {name: value}}
