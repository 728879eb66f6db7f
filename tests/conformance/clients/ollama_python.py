"""Ollama's client for Python."""

from __future__ import annotations

import ollama
from cases import ANSWER, MODEL, QUESTION, TOOL_SCHEMA, URL, WISH, case, main

client = ollama.Client(host=URL)
ASK = [{"role": "user", "content": QUESTION}]
OPTIONS = {"temperature": 0, "num_predict": 80}


@case
def chat() -> None:
    assert ANSWER in client.chat(model=MODEL, messages=ASK, options=OPTIONS).message.content


@case
def chat_streamed() -> None:
    stream = client.chat(model=MODEL, messages=ASK, options=OPTIONS, stream=True)
    assert ANSWER in "".join(part.message.content or "" for part in stream)


@case
def tool_call() -> None:
    function = {"name": "draw", "description": "Draw a picture.", "parameters": TOOL_SCHEMA}
    tools = [{"type": "function", "function": function}]
    wish = [{"role": "user", "content": WISH}]
    made = client.chat(model=MODEL, messages=wish, tools=tools, options=OPTIONS)
    (call,) = made.message.tool_calls
    assert "circle" in call.function.arguments["prompt"]


@case
def generate() -> None:
    assert client.generate(model=MODEL, prompt=QUESTION, options=OPTIONS).response


@case
def embed() -> None:
    assert len(client.embed(model="pocket-embed", input=["red", "blue"]).embeddings) == 2


@case
def listed_and_shown() -> None:
    assert any(MODEL in model.model for model in client.list().models)
    assert client.show(MODEL).modelinfo is not None


@case
def running() -> None:
    assert client.ps().models is not None


main("ollama")
