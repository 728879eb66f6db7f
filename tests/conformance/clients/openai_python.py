"""OpenAI's client for Python."""

from __future__ import annotations

import io
import json
import time
import wave
from typing import Any, Literal

import openai
from cases import ANSWER, KEY, MODEL, QUESTION, TOOL_SCHEMA, V1, WISH, case, main
from pydantic import BaseModel

client = openai.OpenAI(base_url=V1, api_key=KEY, max_retries=0)
ASK: list[Any] = [{"role": "user", "content": QUESTION}]
TOOL: Any = {
    "type": "function",
    "function": {"name": "draw", "description": "Draw a picture.", "parameters": TOOL_SCHEMA},
}


class Shape(BaseModel):
    """A reply of a given shape."""

    color: Literal["red", "blue"]
    count: Literal[1, 2, 3]


@case
def models() -> None:
    assert MODEL in [model.id for model in client.models.list()]


@case
def chat() -> None:
    made = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0)
    assert ANSWER in (made.choices[0].message.content or "")
    assert made.usage is not None


@case
def chat_streamed() -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert ANSWER in text
    assert chunks[-1].usage is not None


@case
def tool_call_and_its_result() -> None:
    wish: list[Any] = [{"role": "user", "content": WISH}]
    made = client.chat.completions.create(
        model=MODEL, messages=wish, tools=[TOOL], temperature=0, max_tokens=80
    )
    (call,) = made.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert "circle" in json.loads(call.function.arguments)["prompt"]
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "{}"}
    more = [*wish, made.choices[0].message, result]
    told = client.chat.completions.create(
        model=MODEL, messages=more, tools=[TOOL], temperature=0, max_tokens=40
    )
    assert told.choices[0].finish_reason


@case
def structured_output() -> None:
    made = client.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Shape, temperature=0
    )
    assert isinstance(made.choices[0].message.parsed, Shape)


@case
def cancel() -> None:
    with client.chat.completions.create(
        model=MODEL, messages=ASK, stream=True, max_tokens=400, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))


@case
def completions() -> None:
    made = client.completions.create(model=MODEL, prompt="I see", max_tokens=8, logprobs=1)
    assert made.choices[0].logprobs is not None


@case
def errors() -> None:
    try:
        client.chat.completions.create(model=MODEL, messages=ASK, temperature=9)
    except openai.BadRequestError as error:
        assert error.param == "temperature"  # noqa: PT017
        return
    raise AssertionError("a wrong temperature was accepted")


@case
def responses_chain() -> None:
    first = client.responses.create(model=MODEL, input=QUESTION, temperature=0)
    assert ANSWER in first.output_text
    second = client.responses.create(
        model=MODEL, input="And what else?", previous_response_id=first.id
    )
    assert second.output_text
    client.responses.delete(first.id)


@case
def responses_streamed() -> None:
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0) as stream:
        kinds = {event.type for event in stream}
        assert ANSWER in stream.get_final_response().output_text
    assert "response.output_text.delta" in kinds


@case
def embeddings() -> None:
    made = client.embeddings.create(model="pocket-embed", input=["red", "blue"])
    assert len(made.data) == 2


@case
def speech_and_transcription() -> None:
    sound = client.audio.speech.create(
        model="pocket-tts", voice="alloy", input="a red circle", response_format="wav"
    ).content
    with wave.open(io.BytesIO(sound)) as read:
        assert read.getnchannels() == 1
    heard = client.audio.transcriptions.create(model="pocket-asr", file=("a.wav", sound))
    assert isinstance(heard.text, str)


@case
def pictures() -> None:
    made = client.images.generate(model="pocket-draw", prompt="a red circle", n=1)
    assert made.data is not None
    assert made.data[0].b64_json


@case
def files_and_batches() -> None:
    body = {"model": MODEL, "messages": ASK, "temperature": 0}
    url = "/v1/chat/completions"
    lines = [{"custom_id": f"{n}", "method": "POST", "url": url, "body": body} for n in range(3)]
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    assert client.files.retrieve(file.id).bytes == len(data)
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    end = time.monotonic() + 60
    while batch.status not in ("completed", "failed") and time.monotonic() < end:
        time.sleep(0.3)
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "completed"
    answers = client.files.content(batch.output_file_id or "").text.splitlines()
    assert {json.loads(line)["custom_id"] for line in answers} == {"0", "1", "2"}
    assert client.files.delete(file.id).deleted


main("openai")
