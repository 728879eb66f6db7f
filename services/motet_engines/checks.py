"""Refuse what an engine cannot do, by the name of the request's field."""

from __future__ import annotations

from typing import Any

from motet_shared.errors import Overloaded, UnsupportedParameter
from motet_shared.messages import Generate, Image

from .engine import Features

# Fields of `messages.Sampling` that not every engine has, with the values that ask for nothing.
_NEUTRAL: dict[str, Any] = {
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "min_tokens": 0,
    "ignore_eos": False,
}


def check_request(request: Generate, features: Features, engine: str) -> None:
    """Raise UnsupportedParameter for a request that the engine cannot serve.

    Unsupported sampling values that the client left out are reset to neutral. Raises Overloaded for
    a reply that this engine cannot continue, so that another instance is tried.
    """
    if request.chat is not None and request.chat.images:
        features = _check_images(request.chat.images, features, engine)
    _check_sampling(request, features, engine)
    _check_grammar(request, features, engine)
    if request.image_embeddings:
        raise UnsupportedParameter(
            f"`messages`: {engine} is given no image embeddings; send text", param="messages"
        )
    if not features.raw_prompts and request.chat is None:
        raise UnsupportedParameter(
            f"`prompt`: {engine} completes no prompts, only chats; use /v1/chat/completions",
            param="prompt",
        )
    if request.output and not features.continues:
        raise Overloaded(f"output: {engine} cannot continue a reply that began elsewhere")


def _check_images(images: list[Image], features: Features, engine: str) -> Features:
    """Return what is supported for chats with pictures."""
    for image in images:
        kind = "sound" if image.is_audio else "videos" if image.is_video else "pictures"
        if features.pictures is None or kind != "pictures":
            param = image.param or "messages"
            raise UnsupportedParameter(f"`{param}`: {engine} is given no {kind} here", param=param)
    return features.pictures or features


def _check_sampling(request: Generate, features: Features, engine: str) -> None:
    sampling = request.sampling
    for name, neutral in _NEUTRAL.items():
        value = getattr(sampling, name)
        if value == neutral or name in features.sampling:
            continue
        if name in sampling.left_out:
            setattr(sampling, name, neutral)
            continue
        raise UnsupportedParameter(
            f"`{name}` {value}: {engine} has no such parameter; leave it out", param=name
        )
    if sampling.prompt_logprobs >= 0 and not features.prompt_logprobs:
        raise UnsupportedParameter(
            f"`prompt_logprobs` {sampling.prompt_logprobs}: {engine} is not asked for those of a"
            " prompt here; leave it out",
            param="prompt_logprobs",
        )
    for name in ("logprobs", "prompt_logprobs"):
        _check_alternatives(name, getattr(sampling, name), features, engine)


def _check_alternatives(name: str, wanted: int, features: Features, engine: str) -> None:
    if wanted > features.logprobs:
        able = (
            f"returns at most {features.logprobs}"
            if features.logprobs >= 0
            else "returns none here"
        )
        raise UnsupportedParameter(f"`{name}` {wanted}: {engine} {able}; ask for fewer", param=name)


def _check_grammar(request: Generate, features: Features, engine: str) -> None:
    grammar = request.grammar
    if grammar is None:
        return
    param = grammar.param or None
    if grammar.kind not in features.grammars:
        raise UnsupportedParameter(
            f"`{grammar.param or grammar.kind}`: {engine} cannot hold a reply to a {grammar.kind}"
            " here; leave it out",
            param=param,
        )
    if grammar.frame and not features.frames:
        raise UnsupportedParameter(
            f"`{grammar.param or grammar.kind}`: {engine} cannot hold a reply to it behind"
            " reasoning; leave it out, or ask for no reasoning",
            param=param,
        )
    if request.output and not features.continues_grammars:
        raise Overloaded(
            f"{grammar.param or 'grammar'}: {engine} cannot continue a constrained reply that began"
            " elsewhere"
        )
