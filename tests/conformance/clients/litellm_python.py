"""LiteLLM, over OpenAI's and Anthropic's protocols."""

from __future__ import annotations

import litellm
from cases import ANSWER, KEY, MODEL, QUESTION, TOOL_SCHEMA, URL, V1, WISH, case, main

OPTIONS = {"api_base": V1, "api_key": KEY, "temperature": 0, "num_retries": 0}
ASK = [{"role": "user", "content": QUESTION}]
NAME = f"openai/{MODEL}"


@case
def completion() -> None:
    made = litellm.completion(model=NAME, messages=ASK, **OPTIONS)
    assert ANSWER in made.choices[0].message.content


@case
def completion_streamed() -> None:
    stream = litellm.completion(model=NAME, messages=ASK, stream=True, **OPTIONS)
    assert ANSWER in "".join(chunk.choices[0].delta.content or "" for chunk in stream)


@case
def tool_call() -> None:
    function = {"name": "draw", "description": "Draw a picture.", "parameters": TOOL_SCHEMA}
    tools = [{"type": "function", "function": function}]
    wish = [{"role": "user", "content": WISH}]
    made = litellm.completion(model=NAME, messages=wish, tools=tools, max_tokens=80, **OPTIONS)
    (call,) = made.choices[0].message.tool_calls
    assert "circle" in call.function.arguments


@case
def text_completion() -> None:
    name = f"text-completion-openai/{MODEL}"
    made = litellm.text_completion(model=name, prompt="I see", max_tokens=8, **OPTIONS)
    assert made.choices[0].text is not None


@case
def embedding() -> None:
    made = litellm.embedding(
        model="openai/pocket-embed", input=["red", "blue"], api_base=V1, api_key=KEY
    )
    assert len(made.data) == 2


@case
def responses() -> None:
    made = litellm.responses(model=NAME, input=QUESTION, **OPTIONS)
    assert made.output


@case
def messages() -> None:
    made = litellm.completion(
        model=f"anthropic/{MODEL}",
        messages=ASK,
        api_base=URL,
        api_key=KEY,
        temperature=0,
        max_tokens=60,
    )
    assert ANSWER in made.choices[0].message.content


@case
def errors() -> None:
    try:
        litellm.completion(model="openai/no-such-model", messages=ASK, **OPTIONS)
    except litellm.NotFoundError:
        return
    raise AssertionError("an unknown model was accepted")


main("litellm")
