"""What clients may send: every parameter is implemented, without effect, or refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from motet_gateway.http.problems import Problem
from motet_gateway.openai import schema
from motet_gateway.openai.reply_details import ReplyDetails
from motet_gateway.openai.requests import chat_requests, completion_requests, reply_details
from motet_shared.errors import BadRequest, MalformedMessage, MotetError, UnsupportedParameter
from support.running.refusals import refuses

HELLO = [{"role": "user", "content": "hello"}]
DRAW = {"type": "function", "function": {"name": "draw", "parameters": {"type": "object"}}}
PAINT = {"type": "function", "function": {"name": "paint"}}


def chat(**fields: Any) -> schema.ChatBody:
    return schema.parse_chat(json.dumps({"model": "m", "messages": HELLO, **fields}).encode())


def completion(**fields: Any) -> schema.CompletionBody:
    return schema.parse_completion(json.dumps({"model": "m", "prompt": "hello", **fields}).encode())


def refused(**fields: Any) -> MotetError:
    with pytest.raises(BadRequest) as caught:
        chat_requests(chat(**fields), "r")
    return caught.value


# ------------------------------------------------------------------------------------------------- the whole schema
def test_every_parameter_of_the_public_schema_is_known() -> None:
    public = set(chat_create_params.CompletionCreateParamsStreaming.__annotations__)
    assert public <= {field.encode_name for field in msgspec.structs.fields(schema.ChatBody)}
    public = set(completion_create_params.CompletionCreateParamsStreaming.__annotations__)
    assert public <= {field.encode_name for field in msgspec.structs.fields(schema.CompletionBody)}


@pytest.mark.parametrize("name", sorted(schema.NO_EFFECT))
def test_a_parameter_without_effect_takes_null_and_its_default_only(name: str) -> None:
    parse = (
        chat
        if name in {field.name for field in msgspec.structs.fields(schema.ChatBody)}
        else completion
    )
    for value in (None, *schema.NO_EFFECT[name]):
        parse(**{name: value})
    for other in ("nonsense", {"x": 1}, 7):
        with pytest.raises(UnsupportedParameter, match=f"`{name}`") as caught:
            parse(**{name: other})
        assert caught.value.param == name


def test_one_is_not_true() -> None:
    with refuses(BadRequest, "parallel_tool_calls"):
        chat(parallel_tool_calls=1)
    with pytest.raises(UnsupportedParameter):
        chat(store=0)


# ------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 2.5}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": 5}, "stop"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias[...]"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"seed": 2**64}, "seed"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"stream": True, "stream_options": {"other": True}}, "stream_options.other"),
        ({"stream": "yes"}, "stream"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "draw"}}}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "paint"}}, "tools": [DRAW]},
            "tool_choice",
        ),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [DRAW]}, "tool_choice"),
        (
            {"tool_choice": "required", "tools": [PAINT, {"type": "image_generation"}]},
            "tool_choice",
        ),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
            "response_format.json_schema.name",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
        ({"structured_outputs": {"structural_tag": {}}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": {}, "response_format": {"type": "json_object"}}, "guided_json"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_whitespace_pattern": "a"}, "guided_whitespace_pattern"),
        ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [1] * 257}, "stop_token_ids"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tools": [{**DRAW, "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        ({"metadata": {"k": 5}}, "metadata[...]"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens"),
        ({"min_p": 2}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"bogus": 1}, "bogus"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0].mood"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        (
            {
                "messages": [
                    {
                        "role": "system",
                        "content": [{"type": "image_url", "image_url": {"url": "data:"}}],
                    }
                ]
            },
            "messages[0].content[0]",
        ),
    ],
)
def test_a_refusal_names_the_parameter(fields: dict[str, Any], param: str) -> None:
    error = refused(**fields)
    assert error.param == param
    assert param.split("[")[0].split(".")[0] in error.message
    problem = Problem.of(error)
    assert (problem.status, problem.type) == (400, "invalid_request_error")


def test_a_refusal_shows_the_value_and_the_bound() -> None:
    assert "2.5" in refused(temperature=2.5).message
    assert "2.0" in refused(temperature=2.5).message


def test_what_a_prompt_is_asked_for() -> None:
    (plain,) = completion_requests(completion(echo=True), "r")
    assert (plain.echo, plain.return_prompt, plain.sampling.prompt_logprobs) == (True, False, -1)
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "prompt_logprobs": 3, "max_tokens": 0}
    body = completion(**fields, return_token_ids=True, stop_token_ids=[5])
    (scored,) = completion_requests(body, "r")
    assert (scored.return_prompt, scored.max_tokens) == (True, 0)
    assert (scored.sampling.logprobs, scored.sampling.prompt_logprobs) == (1, 3)
    assert scored.sampling.stop_token_ids == [5]
    assert reply_details(body) == ReplyDetails(True, 1, 3)
    first, second = chat_requests(chat(prompt_logprobs=0, return_token_ids=True, n=2), "r")
    assert (first.return_prompt, first.sampling.prompt_logprobs) == (True, 0)
    assert (second.return_prompt, second.sampling.prompt_logprobs) == (False, -1)


def test_a_suffix() -> None:
    assert completion_requests(completion(suffix="end"), "r")[0].suffix == "end"
    assert completion_requests(completion(suffix=None), "r")[0].suffix == ""
    with refuses(UnsupportedParameter, "suffix"):
        completion(suffix="end", echo=True)
    with refuses(BadRequest, "suffix"):
        completion(suffix="end", prompt=[5, 6])


def test_guided_parameters_are_structured_outputs() -> None:
    for name, value in {
        "json": {"type": "object"},
        "regex": "a+",
        "choice": ["a", "b"],
        "grammar": 'start: "a"',
    }.items():
        (alias,) = chat_requests(chat(**{f"guided_{name}": value}), "r")
        (given,) = chat_requests(chat(structured_outputs={name: value}), "r")
        assert alias.grammar is not None
        assert given.grammar is not None
        assert (alias.grammar.kind, alias.grammar.text) == (given.grammar.kind, given.grammar.text)
        assert alias.grammar.param == f"guided_{name}"


def test_required_fields() -> None:
    with refuses(BadRequest, "messages"):
        schema.parse_chat(b'{"model": "m"}')
    with refuses(BadRequest, "model"):
        schema.parse_completion(b'{"prompt": "x"}')


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1,",
        b'{"model": "\xff"}',
        b'{"model": "\\ud800"}',
        b'{"model": NaN}',
        b'{"a":' + b"[" * 200_000,
    ],
    ids=["empty", "open", "cut", "not-utf8", "half-surrogate", "nan", "deep"],
)
def test_what_is_not_json_is_malformed(body: bytes) -> None:
    with pytest.raises((MalformedMessage, BadRequest)) as caught:
        schema.parse_chat(body)
    assert Problem.of(caught.value).status == 400


@pytest.mark.parametrize("body", [b"[]", b"5", b"null", b'"x"'])
def test_other_json_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        schema.parse_chat(body)


# ------------------------------------------------------------------------------------------------- what goes onward
def test_sampling_reaches_the_wire() -> None:
    body = chat(
        temperature=0.5,
        top_p=0.9,
        seed=-1,
        max_completion_tokens=40,
        stop=["x", "y"],
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"5": -100, "7": 1.5},
        logprobs=True,
        top_logprobs=3,
        top_k=20,
        min_p=0.05,
        repetition_penalty=1.2,
        min_tokens=4,
        ignore_eos=True,
    )
    (request,) = chat_requests(body, "req_1")
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0.5,
        0.9,
        20,
        0.05,
    )
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (
        0.1,
        0.2,
        1.2,
    )
    assert sampling.logit_bias == {5: -100, 7: 1.5}
    assert (sampling.logprobs, sampling.min_tokens, sampling.ignore_eos) == (3, 4, True)
    assert 0 <= sampling.seed < 2**63
    assert (request.max_tokens, request.stop, request.request_id) == (40, ["x", "y"], "req_1")


def test_defaults() -> None:
    (request,) = chat_requests(chat(), "r")
    assert (request.sampling.temperature, request.sampling.logprobs, request.max_tokens) == (
        1.0,
        -1,
        None,
    )
    (plain,) = completion_requests(completion(), "r")
    assert plain.max_tokens == 16
    assert chat_requests(chat(temperature=0), "r")[0].sampling.temperature == 0


def test_top_p_zero_is_the_likeliest_token() -> None:
    sampling = chat_requests(chat(top_p=0), "r")[0].sampling
    assert (sampling.top_k, sampling.top_p) == (1, 1.0)
    assert "top_k" not in sampling.left_out, "else the model's own replaces it"


def test_a_spoken_reply_comes_back_as_its_transcript() -> None:
    said = {"id": "audio_1", "data": "AAAA", "expires_at": 9, "transcript": "Two stars."}
    spoken: dict[str, Any] = {"role": "assistant", "content": None, "audio": said}
    for message, content in ((spoken, "Two stars."), (spoken | {"content": "Two."}, "Two.")):
        (request,) = chat_requests(chat(messages=[message]), "r")
        assert request.messages == [{"role": "assistant", "content": content}]
    del said["transcript"]
    with pytest.raises(BadRequest) as caught:
        chat_requests(chat(messages=[spoken]), "r")
    assert caught.value.param == "messages[0].audio.transcript"


def test_choices_have_seeds_of_their_own_and_the_same_ones_again() -> None:
    seeds = [request.sampling.seed for request in chat_requests(chat(n=4, seed=7), "r")]
    assert seeds == [request.sampling.seed for request in chat_requests(chat(n=4, seed=7), "r")]
    assert len(set(seeds)) == 4
    assert (
        chat_requests(chat(), "r")[0].sampling.seed != chat_requests(chat(), "r")[0].sampling.seed
    )


def test_messages_become_plain_text() -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "name": "Ann",
        },
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "audio": None,
            "function_call": None,
            "annotations": [],
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "draw", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "content": "done", "tool_call_id": "c1"},
    ]
    (request,) = chat_requests(chat(messages=messages), "r")
    assert request.messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "Ann"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "draw", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "content": "done", "tool_call_id": "c1"},
    ]


def test_tools_reach_the_wire_unless_turned_off() -> None:
    (request,) = chat_requests(chat(tools=[DRAW]), "r")
    assert (request.tools, request.tool_choice) == ([DRAW], "auto")
    (request,) = chat_requests(chat(tools=[DRAW], tool_choice="none"), "r")
    assert request.tool_choice == "none"
    (request,) = chat_requests(
        chat(tools=[DRAW], tool_choice="required", parallel_tool_calls=False), "r"
    )
    assert (request.tool_choice, request.tool, request.parallel_tools) == ("required", "", False)
    for name in (
        {"type": "function", "function": {"name": "draw"}},
        {"type": "function", "name": "draw"},
    ):
        (request,) = chat_requests(chat(tools=[DRAW], tool_choice=name), "r")
        assert (request.tool_choice, request.tool, request.parallel_tools) == (
            "required",
            "draw",
            True,
        )


SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": 1}}}


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        (
            {"response_format": {"type": "json_object"}},
            ("json_schema", {"type": "object"}, "response_format"),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": SCHEMA, "strict": True},
                }
            },
            ("json_schema", SCHEMA, "response_format.json_schema.schema"),
        ),
        (
            {"structured_outputs": {"json": SCHEMA}},
            ("json_schema", SCHEMA, "structured_outputs.json"),
        ),
        (
            {"structured_outputs": {"json": json.dumps(SCHEMA)}},
            ("json_schema", SCHEMA, "structured_outputs.json"),
        ),
        (
            {"structured_outputs": {"json_object": True}},
            ("json_schema", {"type": "object"}, "structured_outputs.json_object"),
        ),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            ("choice", ["a", "b"], "structured_outputs.choice"),
        ),
        ({"structured_outputs": {"regex": "a+"}}, ("regex", "a+", "structured_outputs.regex")),
        (
            {"structured_outputs": {"grammar": "start: x"}},
            ("grammar", "start: x", "structured_outputs.grammar"),
        ),
    ],
)
def test_the_wanted_shape_reaches_the_wire(
    fields: dict[str, Any], grammar: tuple[str, Any, str] | None
) -> None:
    (request,) = chat_requests(chat(**fields), "r")
    (complete,) = completion_requests(completion(**fields), "r")
    assert request.grammar == complete.grammar
    if grammar is None or request.grammar is None:
        assert request.grammar is grammar
        return
    kind, text, param = grammar
    assert (request.grammar.kind, request.grammar.param) == (kind, param)
    if isinstance(text, str):
        assert request.grammar.text == text
        return
    document = json.loads(request.grammar.text)
    assert document == text
    if isinstance(text, dict):
        assert list(document.get("properties", {})) == list(
            text.get("properties", {})
        )  # their order is the reply's


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompts(prompt: Any, prompts: list[Any]) -> None:
    requests = completion_requests(completion(prompt=prompt, n=2), "r")
    assert [request.prompt for request in requests] == [p for p in prompts for _ in range(2)]


@pytest.mark.parametrize(
    "prompt", [[], [[]], ["a", 1], [[1], "a"], [-1], [[-1]], ["a"] * 33, 5, None]
)
def test_prompts_that_are_none(prompt: Any) -> None:
    with pytest.raises(BadRequest) as caught:
        completion_requests(completion(prompt=prompt), "r")
    assert caught.value.param is not None
    assert caught.value.param.startswith("prompt")


@pytest.mark.parametrize(
    ("tier", "priority"), [(None, 0), ("auto", 0), ("default", 0), ("flex", -1), ("priority", 1)]
)
def test_service_tiers_are_priorities(tier: str | None, priority: int) -> None:
    assert chat_requests(chat(service_tier=tier), "r")[0].priority == priority
    assert (
        completion_requests(completion(prompt="a", service_tier=tier), "r")[0].priority == priority
    )


def test_what_a_client_leaves_out_is_left_to_the_model() -> None:
    every = ["temperature", "top_k", "top_p", "min_p", "repetition_penalty"]
    assert chat_requests(chat(), "r")[0].sampling.left_out == every
    given = chat(temperature=0, top_p=1, top_k=0)
    assert chat_requests(given, "r")[0].sampling.left_out == ["min_p", "repetition_penalty"]
    assert completion_requests(completion(prompt="a"), "r")[0].sampling.left_out == every


def test_how_the_prompt_of_a_chat_ends() -> None:
    (request,) = chat_requests(chat(), "r")
    assert (request.add_generation_prompt, request.continue_final_message) == (True, False)
    fields = {"add_generation_prompt": False, "continue_final_message": True}
    (request,) = chat_requests(chat(**fields), "r")
    assert (request.add_generation_prompt, request.continue_final_message) == (False, True)


def test_whose_share_a_request_uses() -> None:
    assert chat_requests(chat(), "r")[0].tenant == ""
    assert chat_requests(chat(user="u"), "r")[0].tenant == "u"
    assert chat_requests(chat(user="u", safety_identifier="s"), "r")[0].tenant == "s"
    assert completion_requests(completion(prompt="a", user="u"), "r")[0].tenant == "u"


def test_the_readme_names_every_parameter() -> None:
    readme = (Path(schema.__file__).parents[1] / "README.md").read_text()
    fields = {
        f.encode_name
        for body in (schema.ChatBody, schema.CompletionBody)
        for f in msgspec.structs.fields(body)
    }
    assert [name for name in sorted(fields - {"prompt", "echo"}) if f"`{name}" not in readme] == []
