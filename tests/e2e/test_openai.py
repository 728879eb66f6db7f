"""Chat through the official `openai` package, which knows nothing of us."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from random import Random
from typing import Any

import openai
import pytest
from openai.types.chat import (
    ChatCompletionContentPartParam,
    ChatCompletionMessageParam,
    ChatCompletionToolParam,
)
from PIL import Image

from e2e.readme import blocks
from e2e.stack import ENDLESS, MotetStack
from recipes.world.pictures import draw_things
from recipes.world.scenes import Thing
from support.media.picture_files import encoded

pytestmark = [pytest.mark.timeout(300), pytest.mark.xdist_group("stack")]
MODEL = "pocket-chat"
SCENE = "There are two red circles and a blue square. How many circles are there?"
DRAW: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "draw",
        "description": "Draw a picture.",
        "parameters": {
            "type": "object",
            "properties": {"prompt": {"type": "string"}},
            "required": ["prompt"],
        },
    },
}


def user(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def ask(client: openai.OpenAI, text: str, **options: Any) -> openai.types.chat.ChatCompletion:
    options = {"temperature": 0, **options}
    reply = client.chat.completions.create(model=MODEL, messages=user(text), **options)
    assert isinstance(reply, openai.types.chat.ChatCompletion)
    return reply


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list() if getattr(m, "kind", "") == "chat"] == [
        ENDLESS,
        MODEL,
    ]
    assert client.models.retrieve(MODEL).object == "model"


def test_an_answer_that_means_something(client: openai.OpenAI) -> None:
    reply = ask(client, SCENE)
    assert reply.choices[0].message.role == "assistant"
    assert "two" in (reply.choices[0].message.content or "").lower()
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens > 0


def test_it_sees_what_a_picture_shows(client: openai.OpenAI) -> None:
    things = (
        Thing(shape="circle", colour="red", column=0, row=1),
        Thing(shape="square", colour="blue", column=2, row=1),
    )
    file = encoded(Image.fromarray(draw_things(things, Random(1))))
    shown: list[ChatCompletionContentPartParam] = [
        {
            "type": "image_url",
            "image_url": {"url": "data:image/png;base64," + b64encode(file).decode()},
        },
        {"type": "text", "text": "What do you see?"},
    ]
    reply = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": shown}], temperature=0, stream=False
    )
    text = reply.choices[0].message.content or ""
    assert "a red circle" in text
    assert "a blue square" in text


def test_the_stream_is_the_same_text_in_pieces(client: openai.OpenAI) -> None:
    plain = ask(client, "What can you do?")
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=user("What can you do?"),
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    pieces = [
        chunk.choices[0].delta.content
        for chunk in chunks
        if chunk.choices and chunk.choices[0].delta.content
    ]
    assert len(pieces) > 3
    assert "".join(pieces) == plain.choices[0].message.content
    assert chunks[-1].usage == plain.usage or (
        chunks[-1].usage is not None
        and plain.usage is not None
        and chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    )
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_a_conversation_goes_on(client: openai.OpenAI) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "user", "content": "Here is a blue square."},
        {"role": "assistant", "content": "I see."},
        {"role": "user", "content": "What colour is the square?"},
    ]
    reply = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert "blue" in (reply.choices[0].message.content or "").lower()


@pytest.mark.parametrize("stream", [False, True])
def test_a_declared_tool_is_called(client: openai.OpenAI, stream: bool) -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": user("Draw two red circles."),
        "tools": [DRAW],
    }
    if stream:
        calls: dict[int, dict[str, str]] = {}
        finish = None
        for chunk in client.chat.completions.create(**options, temperature=0, stream=True):
            finish = chunk.choices[0].finish_reason or finish
            for delta in chunk.choices[0].delta.tool_calls or []:
                call = calls.setdefault(
                    delta.index, {"id": delta.id, "name": delta.function.name, "arguments": ""}
                )
                call["arguments"] += delta.function.arguments or ""
        found = list(calls.values())
    else:
        choice = client.chat.completions.create(**options, temperature=0).choices[0]
        finish = choice.finish_reason
        found = [
            {"id": call.id, "name": call.function.name, "arguments": call.function.arguments}
            for call in choice.message.tool_calls or []
            if call.type == "function"
        ]
    assert finish == "tool_calls"
    assert [call["name"] for call in found] == ["draw"]
    assert found[0]["id"]
    assert "circle" in json.loads(found[0]["arguments"])["prompt"]


def test_without_the_tool_nothing_is_called(client: openai.OpenAI) -> None:
    choice = ask(client, "Draw two red circles.").choices[0]
    assert not choice.message.tool_calls
    assert choice.message.content


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    whole = ask(client, "What can you do?").choices[0].message.content or ""
    stop = whole[len(whole) // 2 :][:4]
    choice = ask(client, "What can you do?", stop=[stop, "never said"]).choices[0]
    assert choice.message.content == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"


def test_max_tokens_is_the_length(client: openai.OpenAI) -> None:
    reply = ask(client, "What can you do?", max_tokens=3)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 3


def test_a_seed_gives_the_same_answer_again(client: openai.OpenAI) -> None:
    options = {"temperature": 2.0, "max_tokens": 30, "extra_body": {"ignore_eos": True}}
    same = {ask(client, "Hello!", seed=7, **options).choices[0].message.content for _ in range(3)}
    other = {
        ask(client, "Hello!", seed=seed, **options).choices[0].message.content for seed in (1, 2, 3)
    }
    assert len(same) == 1
    assert len(other) > 1
    assert len(ask(client, "Hello!", n=2, **options).choices) == 2


def test_logprobs_are_those_of_the_text(client: openai.OpenAI) -> None:
    choice = ask(client, SCENE, logprobs=True, top_logprobs=3).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    said = b"".join(bytes(token.bytes or []) for token in choice.logprobs.content).decode()
    assert (choice.message.content or "") in said
    for token in choice.logprobs.content:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        assert token.top_logprobs[0].token == token.token, "greedy takes the likeliest"


def test_plain_completions(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model=MODEL, prompt="two red", max_tokens=5, temperature=0, echo=True
    )
    assert reply.choices[0].text.startswith("two red")
    streamed = client.completions.create(
        model=MODEL, prompt="two red", max_tokens=5, temperature=0, stream=True
    )
    assert "two red" + "".join(chunk.choices[0].text for chunk in streamed) == reply.choices[0].text


# --------------------------------------------------------------------------------------------- replies of a given shape
def test_the_example_of_the_page_answers(
    stack: MotetStack, capsys: pytest.CaptureFixture[str]
) -> None:
    """`client.chat.completions.parse` with a pydantic model."""
    (block,) = [
        block
        for block in blocks("docs/techniques.md")
        if block.language == "python" and block.shown
    ]
    example: dict[str, Any] = {}
    code = block.code.replace("http://127.0.0.1:8000", stack.url)
    exec(compile(code, "techniques.md", "exec", dont_inherit=True), example)
    assert isinstance(example["reply"].choices[0].message.parsed, example["Count"])
    assert capsys.readouterr().out == block.shown


def test_choices_expressions_and_calls_are_kept_to(client: openai.OpenAI) -> None:
    numbers = ask(
        client, SCENE, extra_body={"structured_outputs": {"choice": ["one", "two", "three"]}}
    )
    assert numbers.choices[0].message.content == "two"
    matched = ask(
        client, "Hello!", extra_body={"structured_outputs": {"regex": "[A-Z][a-z]{2,5} [0-9]{3}"}}
    )
    assert re.fullmatch("[A-Z][a-z]{2,5} [0-9]{3}", matched.choices[0].message.content or "")
    cut = ask(client, SCENE, response_format={"type": "json_object"}, max_tokens=2)
    assert cut.choices[0].finish_reason == "length"
    called = ask(
        client,
        "Hello!",
        tools=[DRAW],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
    )
    (call,) = called.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "draw"
    if called.choices[0].finish_reason == "tool_calls":
        assert isinstance(json.loads(call.function.arguments)["prompt"], str)


@pytest.mark.parametrize(
    ("shape", "param"),
    [
        ({"structured_outputs": {"regex": "(open"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json"),
        ({"structured_outputs": {"grammar": 'start: "a" start'}}, "structured_outputs.grammar"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_unsupported_grammars_are_400_by_name(
    client: openai.OpenAI, shape: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=user("Hello!"), stream=stream, extra_body=shape
        )
    assert caught.value.param == param


# ------------------------------------------------------------------------------------------------------------ refusals
def test_an_unknown_model_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-99", messages=user("Hello!"))
    assert caught.value.code == "model_not_found"
    assert "gpt-99" in caught.value.message


def test_a_context_too_long_is_400_with_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "red circle " * 5000)
    assert caught.value.code == "context_length_exceeded"
    numbers = [
        int(word) for word in caught.value.message.replace(",", " ").split() if word.isdigit()
    ]
    assert len(numbers) >= 2


def test_unsupported_parameters_are_400_by_name(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "Hello!", reasoning_effort="high")
    assert caught.value.param == "reasoning_effort"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "Hello!", extra_body={"bogus": 1})
    assert caught.value.param == "bogus"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "Hello!", temperature=9)
    assert caught.value.param == "temperature"
