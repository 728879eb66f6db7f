"""Requests of every kind, each as one client that says how far it has come and returns all that it was told."""

from __future__ import annotations

import base64
import io
import json
import operator
import os
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from support.clients.realtime_client import TRANSCRIPTION, Client, sound, talking
from support.media.spoken import say, silence, wav

# Models by what they are for; chaos/moves/models.py makes them.
TEXT, SCRIPT, ADAPTER, EYES, LONG, SPLIT = "text", "script", "ink", "eyes", "long", "split"
SPECULATIVE = ("ngram", "draft", "medusa", "eagle")
EARS, STREAM_EARS, VOICE, BRUSH = "ears", "stream-ears", "voice", "brush"

Told = Callable[[int], None]  # progress, in a unit of the feature's own
Ask = Callable[[str, Told], Coroutine[Any, Any, Any]]
PATIENCE = 60.0  # seconds for a whole reply
_LINE = "Two red circles and a blue square. Where is the small green star?"
_SCHEMA = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 300, "maxLength": 300}},
    "required": ["text"],
    "additionalProperties": False,
}
_TOOL = {
    "type": "function",
    "function": {
        "name": "draw",
        "parameters": {"type": "object", "properties": {"shape": {"type": "string"}}},
    },
}


def _http(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE, trust_env=False, verify=False)


async def _events(
    http: httpx.AsyncClient, path: str, **request: Any
) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a stream; raises RuntimeError for an error in it, or without its end."""
    async with http.stream("POST", path, **request) as reply:
        if reply.status_code != 200:
            raise RuntimeError((await reply.aread()).decode()[:500])
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(json.dumps(event["error"]))
                yield event


# ---------------------------------------------------------------------------------------------------------------- text
async def _chat(url: str, told: Told, *, of: str = "content", **body: Any) -> Any:
    """Return each choice's parts and end, and the usage. `of`: the part that counts as progress."""
    parts: dict[tuple[int, str], str] = {}
    scores: dict[int, list[Any]] = {}
    finish: dict[int, str] = {}
    usage: dict[str, Any] = {}
    body = {"stream": True, "stream_options": {"include_usage": True}, **body}
    async with _http(url) as http:
        async for event in _events(http, "/v1/chat/completions", json=body):
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                index, delta = choice["index"], choice["delta"]
                for name, text in _texts(delta):
                    parts[index, name] = parts.get((index, name), "") + text
                scores.setdefault(index, []).extend(
                    (choice.get("logprobs") or {}).get("content") or ()
                )
                finish |= {index: choice["finish_reason"]} if choice["finish_reason"] else {}
            told(sum(len(text) for (_, name), text in parts.items() if name == of))
    if not finish:
        raise RuntimeError("the stream ended without a reason")
    usage.pop("prompt_tokens_details", None)  # what a prefix cache happened to hold
    for guessed in ("accepted_prediction_tokens", "rejected_prediction_tokens"):
        usage["completion_tokens_details"].pop(guessed, None)  # depends on who drafted when
    return parts, scores, finish, usage


def _texts(delta: dict[str, Any]) -> list[tuple[str, str]]:
    found = [(name, delta.get(name) or "") for name in ("content", "reasoning_content")]
    for call in delta.get("tool_calls") or ():
        function = call["function"]
        found += [(name, function.get(name) or "") for name in ("name", "arguments")]
    return [(name, text) for name, text in found if text]


def _user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


_SEEDED: dict[str, Any] = {"temperature": 1, "seed": 7, "max_tokens": 400, "ignore_eos": True}
several = partial(_chat, model=TEXT, messages=_user("say much"), n=3, **_SEEDED)
logprobs = partial(
    _chat, model=TEXT, messages=_user("say it"), logprobs=True, top_logprobs=3, **_SEEDED
)
grammar = partial(
    _chat,
    model=TEXT,
    messages=_user("an object"),
    response_format={
        "type": "json_schema",
        "json_schema": {"name": "o", "schema": _SCHEMA, "strict": True},
    },
    temperature=1,
    seed=3,
    max_tokens=600,
)
_SCRIPTED: dict[str, Any] = {
    "model": SCRIPT,
    "messages": _user("Draw a star."),
    "tools": [_TOOL],
    "temperature": 0,
    "max_tokens": 2000,
}
reasoning = partial(_chat, of="reasoning_content", **_SCRIPTED)
arguments = partial(_chat, of="arguments", **_SCRIPTED)
adapter = partial(_chat, model=ADAPTER, messages=_user("say it"), **_SEEDED)
beyond_pool = partial(_chat, model=LONG, messages=_user("a long text " * 200), **_SEEDED)
split = partial(_chat, model=SPLIT, messages=_user("a long prompt " * 700), **_SEEDED)


async def pictures(url: str, told: Told) -> Any:
    shown = io.BytesIO()
    Image.radial_gradient("L").convert("RGB").resize((64, 64)).save(shown, "PNG")
    data = "data:image/png;base64," + base64.b64encode(shown.getvalue()).decode()
    content = [
        {"type": "text", "text": "What is in the picture?"},
        {"type": "image_url", "image_url": {"url": data}},
    ]
    messages = [{"role": "user", "content": content}]
    return await _chat(url, told, model=EYES, messages=messages, **_SEEDED | {"max_tokens": 150})


def speculated(kind: str) -> Ask:
    return partial(_chat, model=kind, messages=_user("abc abc abc abc"), **_SEEDED)


# --------------------------------------------------------------------------------------------------------- sound, light
async def speech(url: str, told: Told) -> bytes:
    body = {"model": VOICE, "input": _LINE * 3, "response_format": "pcm", "seed": 5}
    data = b""
    async with _http(url) as http, http.stream("POST", "/v1/audio/speech", json=body) as reply:
        if reply.status_code != 200:
            raise RuntimeError((await reply.aread()).decode()[:500])
        async for piece in reply.aiter_raw():
            data += piece
            told(len(data))
    return data


async def recording(url: str, told: Told) -> str:
    """A recording, cut into what is spoken by the vad."""
    sound = b"".join(silence(300) + say(_LINE) + silence(300) for _ in range(4))
    fields = {
        "model": EARS,
        "language": "en",
        "stream": "true",
        "chunking_strategy": '{"type": "server_vad"}',
    }
    text, files = "", {"file": ("said.wav", wav(sound))}
    async with _http(url) as http:
        path = "/v1/audio/transcriptions"
        async for event in _events(http, path, data=fields, files=files):
            if event["type"] == "transcript.text.done":
                return str(event["text"])
            text += event.get("delta", "")
            told(len(text))
    raise RuntimeError("the transcript has no end")


async def live(url: str, told: Told) -> str:
    """Speech that is heard while it is spoken, by a model that hears each stretch once."""
    async with _session(url, TEXT) as client:
        heard = {"turn_detection": None, "transcription": {"model": STREAM_EARS, "language": "en"}}
        await client.update(audio={"input": heard})
        pcm = say(_LINE) + silence(400)
        for start in range(0, len(pcm), 4800):
            await client.audio(pcm[start : start + 4800])
            told(start)
        await client.send("input_audio_buffer.commit")
        await client.until(f"{TRANSCRIPTION}.completed")
        return str(client.events[-1]["transcript"])


async def picture(url: str, told: Told) -> str:
    body = {
        "model": BRUSH,
        "prompt": "two red circles",
        "size": "128x128",
        "steps": 60,
        "seed": 4,
        "stream": True,
        "progress": True,
    }
    async with _http(url) as http:
        async for event in _events(http, "/v1/images/generations", json=body):
            if event["type"] == "image_generation.completed":
                return str(event["b64_json"])
            told(event["step"])
    raise RuntimeError("the picture has no end")


def within_one(one: str, other: str) -> bool:
    """Return True if no value of two drawings differs by more than 1 of 255.

    The batch that a drawing is in decides how its products are summed.
    """
    pixels = [
        np.asarray(Image.open(io.BytesIO(base64.b64decode(drawing))).convert("RGB")).astype(int)
        for drawing in (one, other)
    ]
    return pixels[0].shape == pixels[1].shape and bool(abs(pixels[0] - pixels[1]).max() <= 1)


def _session(url: str, model: str) -> AbstractAsyncContextManager[Client]:
    return talking(f"{url.replace('http', 'ws', 1)}/v1/realtime?model={model}")


async def barge_in(url: str, told: Told) -> Any:
    """A spoken question, an answer that is interrupted by speech, and the answer to that.

    Where the first answer is cut, and whether it is over by then, depends on when; what is heard and the second answer
    do not.
    """
    async with _session(url, TEXT) as client:
        heard = {
            "turn_detection": {"type": "server_vad", "interrupt_on": "speech"},
            "transcription": {"model": EARS, "language": "en"},
        }
        await client.update(temperature=0, max_output_tokens=400, audio={"input": heard})
        await client.audio(silence(500) + say("Tell me a story.") + silence(900))
        await client.until("response.output_audio.delta")
        told(1)
        await client.audio(say("Stop it now, please.") + silence(900))
        told(2)
        first = (await client.until("response.done"))[-1]["response"]
        told(3)
        last = (await client.until("response.done"))[-1]["response"]
        told(4)
        said = [e["transcript"] for e in client.events if e["type"] == f"{TRANSCRIPTION}.completed"]
        mine = [e for e in client.events if e.get("response_id") == last["id"]]
        text = last["output"][0]["content"][0]["transcript"]
        if first["status"] not in ("cancelled", "incomplete"):
            raise RuntimeError(f"the first answer is {first['status']}")
        return said, last["status"], text, sound(mine)


# ------------------------------------------------------------------------------------------------------------ the table
BEGIN, MIDDLE, END = PHASES = ("begin", "middle", "end")


@dataclass(frozen=True)
class Feature:
    """Describe a request: its client, the models that it needs, and the roles that are at work in each phase.

    In `begin` a role has just begun; `middle` and `end` are shares of the progress of an undisturbed run.
    brief: phases that last milliseconds, for which a strike may come too late: not in `make test-long`.
    alike: whether a result that was computed beside others is that of an undisturbed run.
    """

    ask: Ask
    models: tuple[str, ...]
    roles: tuple[str, ...]
    begin: tuple[str, ...] = ()  # further roles, which are at work in the beginning alone
    middle: float = 0.5
    end: float = 0.9
    brief: tuple[str, ...] = ()
    alike: Callable[[Any, Any], bool] = operator.eq

    def at_work(self, phase: str) -> tuple[str, ...]:
        """Return the roles that may be struck in a phase."""
        return (*self.roles, *self.begin) if phase == BEGIN else self.roles


def _text(
    ask: Ask, model: str = TEXT, begin: tuple[str, ...] = (), brief: tuple[str, ...] = ()
) -> Feature:
    return Feature(ask, (model,), ("tokenizer", "decode"), begin, brief=brief)


FEATURES: dict[str, Feature] = {
    "several choices": _text(several),
    "seeds and logprobs": _text(logprobs),
    "a grammar": _text(grammar),
    "reasoning": _text(reasoning, SCRIPT),
    "tool arguments": _text(arguments, SCRIPT),
    "an adapter": _text(adapter),
    **{f"drafts of {kind}": _text(speculated(kind), kind) for kind in SPECULATIVE},
    "a picture in the prompt": _text(pictures, EYES, ("encoder",), (END,)),
    "a context beyond the pool": _text(beyond_pool, LONG),
    "a prompt computed elsewhere": _text(split, SPLIT, ("prefill",)),
    "speech": Feature(speech, (VOICE,), ("tts",), brief=(END,)),
    "a recording": Feature(recording, (EARS,), ("asr",), ("vad",)),
    "live speech": Feature(live, (TEXT, STREAM_EARS), ("asr",)),
    "a drawing": Feature(picture, (BRUSH,), ("diffusion",), alike=within_one),
    "an interruption": Feature(
        barge_in, (TEXT, EARS, VOICE), ("vad", "tokenizer", "decode", "tts"), ("asr",), end=0.7
    ),
}


def tiered(every: Sequence[tuple[str, ...]], covering: Collection[tuple[str, ...]]) -> list[Any]:
    """Return parameters: a covering selection for `make test-long`, all others for `PART=storm`.

    MOTET_MOVES=2/4 leaves the second of four slices of the others.
    """
    number, of = map(int, os.environ.get("MOTET_MOVES", "1/1").split("/"))
    others = [case for case in every if case not in covering][number - 1 :: of]
    return [
        pytest.param(
            *case, marks=pytest.mark.long if case in covering else pytest.mark.extended("storm")
        )
        for case in every
        if case in covering or case in others
    ]
