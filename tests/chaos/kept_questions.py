"""What clients of a gateway that dies ask, and what its answer says, whatever it was cut into.

Where a stream is cut into events differs between two undisturbed runs, too, so the events of a text or a sound are
joined. All else is compared: every character, log-probability, sample and count, one id and one time in all events.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx

from e2e.stack import ASR_MODEL, VOICE
from support.media.spoken import say, silence, wav

MODEL = "markov"
BRUSH = "brush"
TOKENS = 500
_TEXT = " ".join(f"This is sentence number {number} of a long story." for number in range(12))
_SPOKEN = "Two red circles and a blue square. Where is the small green star?"


@dataclass(frozen=True)
class Question:
    """A request. `said`: what the body of its answer says; raises unless that is complete."""

    path: str
    content: bytes
    said: Callable[[bytes], Any]
    content_type: str = "application/json"
    streams: bool = True


def questions(count: int) -> list[Question]:
    """Questions of all kinds, again and again; text is asked for most, speech and a picture once.

    Voices and pictures that are computed together are rounded together, so two of them would
    not be the same each time.
    """
    kinds = [KINDS[number % len(KINDS)] for number in range(count)]
    return [
        kind(number)
        for number, kind in enumerate(kinds)
        if kind not in (speech, picture) or number < len(KINDS)
    ]


# ----------------------------------------------------------------------------------------------------------------- text
def openai(number: int) -> Question:
    """Chats and completions, streamed and whole, of one or several choices, some with log-probabilities."""
    streams = number % 4 != 3
    body = {**_sampled(number), "stream": streams, "max_tokens": TOKENS}
    said = _choices if streams else _whole
    if number % 3 == 2:
        body |= {"prompt": _prompt(number), "logprobs": 2}
        return _asked("/v1/completions", body, said, streams=streams)
    body |= {"messages": _messages(number), "n": 1 + (number % 5 == 4)}
    return _asked("/v1/chat/completions", body, said, streams=streams)


def response(number: int) -> Question:
    body = {**_sampled(number), "stream": True, "max_output_tokens": TOKENS}
    return _asked("/v1/responses", {**body, "input": _prompt(number)}, _response)


def message(number: int) -> Question:
    body = {"model": MODEL, "max_tokens": TOKENS, "stream": True, "messages": _messages(number)}
    return _asked("/v1/messages", {**body, "temperature": 0}, _message)


def ollama(number: int) -> Question:
    options = {"temperature": number % 2, "seed": number, "num_predict": TOKENS}
    body = {"model": MODEL, "options": options}
    if number % 4 < 2:
        return _asked("/api/chat", {**body, "messages": _messages(number)}, _lines)
    return _asked("/api/generate", {**body, "prompt": _prompt(number)}, _lines)


def _sampled(number: int) -> dict[str, Any]:
    return {"model": MODEL, "temperature": number % 2, "seed": number, "ignore_eos": True}


def _prompt(number: int) -> str:
    return f"stream {number} says {'abcdefgh'[number % 8]}"


def _messages(number: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": _prompt(number)}]


def _asked(
    path: str, body: dict[str, Any], said: Callable[[bytes], Any], *, streams: bool = True
) -> Question:
    return Question(path, json.dumps(body).encode(), said, streams=streams)


def _whole(body: bytes) -> Any:
    said = json.loads(body)
    del said["id"], said["created"], said["usage"]["prompt_tokens_details"]
    return said


def _choices(body: bytes) -> list[Any]:
    """The text, scores and end of each choice."""
    *events, done = body.removesuffix(b"\n\n").split(b"\n\n")
    assert done == b"data: [DONE]"
    parsed = [json.loads(event.removeprefix(b"data: ")) for event in events]
    assert len({(one["id"], one["created"], one["model"], one["object"]) for one in parsed}) == 1
    choices: dict[int, list[Any]] = {}
    for one in parsed:
        for choice in one["choices"]:
            texts, scores, finish = choices.setdefault(choice["index"], ["", [], []])
            texts += choice["text"] if "text" in choice else choice["delta"].get("content", "")
            scores += (choice["logprobs"] or {}).get("token_logprobs", [])
            finish += [choice["finish_reason"]] if choice["finish_reason"] else []
            choices[choice["index"]][0] = texts
    return [choices[index] for index in sorted(choices)]


def _named_events(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream in which each has its name; raises if a name is not that of its data."""
    events = []
    for event in body.removesuffix(b"\n\n").split(b"\n\n"):
        name, _, data = event.partition(b"\n")
        parsed = json.loads(data.removeprefix(b"data: "))
        assert name.removeprefix(b"event: ").decode() == parsed["type"]
        events.append(parsed)
    return events


def _response(body: bytes) -> Any:
    events = _named_events(body)
    assert [one["sequence_number"] for one in events] == list(range(len(events)))
    end = events[-1]["response"]
    assert end["created_at"] == events[0]["response"]["created_at"]
    assert {one["response"]["id"] for one in events if "response" in one} == {end["id"]}
    (item,) = end["output"]
    text = "".join(one["delta"] for one in events if one["type"] == "response.output_text.delta")
    assert text == item["content"][0]["text"]
    assert {one["item_id"] for one in events if "item_id" in one} == {item["id"]}
    kinds = [one["type"] for one in events if not one["type"].endswith(".delta")]
    return kinds, text, end["status"], end["usage"]["output_tokens"]


def _message(body: bytes) -> Any:
    events = _named_events(body)
    deltas = [one for one in events if one["type"] == "content_block_delta"]
    text = "".join(one["delta"]["text"] for one in deltas)
    assert events[0]["message"]["id"].startswith("msg_")
    kinds = [one["type"] for one in events if one not in deltas]
    (end,) = (one for one in events if one["type"] == "message_delta")
    return kinds, text, end["delta"], end["usage"]["output_tokens"]


def _lines(body: bytes) -> Any:
    lines = [json.loads(line) for line in body.splitlines()]
    assert [one["done"] for one in lines] == [False] * (len(lines) - 1) + [True]
    text = "".join(
        one.get("response", "") or one.get("message", {}).get("content", "") for one in lines
    )
    return text, lines[-1]["done_reason"], lines[-1]["eval_count"]


# --------------------------------------------------------------------------------------------------- sound and pictures
def speech(number: int) -> Question:
    """Speech as it is, coded, and as events."""
    form = ("pcm", "mp3", "opus", "wav", "flac")[number % 5]
    body = {"model": VOICE, "input": _TEXT, "seed": number, "response_format": form}
    if number % 2:
        return _asked("/v1/audio/speech", {**body, "stream_format": "sse"}, _spoken)
    return _asked("/v1/audio/speech", body, lambda sound: sound)


def transcript(number: int) -> Question:
    silent = silence(500)
    sound = wav(silent.join([say(_SPOKEN)] * 12))
    form = {"model": ASR_MODEL, "stream": "true", "language": "en"}
    request = httpx.Request("POST", "http://here/", data=form, files={"file": ("a.wav", sound)})
    content_type = request.headers["content-type"]
    return Question("/v1/audio/transcriptions", request.read(), _transcribed, content_type)


def picture(number: int) -> Question:
    body = {"model": BRUSH, "prompt": "two red circles", "size": "128x128", "steps": 60}
    more = {"seed": number, "stream": True, "partial_images": 2, "progress": True}
    return _asked("/v1/images/generations", body | more, _drawn)


def _data_events(body: bytes) -> list[dict[str, Any]]:
    events = body.removesuffix(b"\n\n").split(b"\n\n")
    return [json.loads(event.rpartition(b"data: ")[2]) for event in events]


def _spoken(body: bytes) -> Any:
    *deltas, done = _data_events(body)
    assert {one["type"] for one in deltas} == {"speech.audio.delta"}
    assert done["type"] == "speech.audio.done"
    sound = b"".join(base64.b64decode(one["audio"]) for one in deltas)
    return sound, done["words"], done["usage"]


def _transcribed(body: bytes) -> Any:
    *events, done = _data_events(body)
    text = "".join(one["delta"] for one in events if one["type"] == "transcript.text.delta")
    assert text.strip() == done["text"].strip()
    segments = [one for one in events if one["type"] == "transcript.text.segment"]
    return text, segments, done["usage"]


def _drawn(body: bytes) -> Any:
    """The picture. Steps that nobody waited for are left out, in an undisturbed run too; none comes twice."""
    *progress, picture = _data_events(body)
    steps = [one["step"] for one in progress if "step" in one]
    assert steps == sorted(set(steps))
    assert picture["type"] == "image_generation.completed"
    assert {one.get("created_at", picture["created_at"]) for one in progress} == {
        picture["created_at"]
    }
    return picture["b64_json"]


KINDS = (
    openai,
    openai,
    response,
    openai,
    message,
    openai,
    ollama,
    openai,
    speech,
    transcript,
    picture,
)
