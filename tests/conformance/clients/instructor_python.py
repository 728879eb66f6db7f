"""instructor: replies as pydantic models, by a tool or by a schema."""

from __future__ import annotations

from typing import Literal

import anthropic
import instructor
import openai
from cases import KEY, MODEL, QUESTION, URL, V1, case, main
from pydantic import BaseModel, ConfigDict

ASK = [{"role": "user", "content": QUESTION}]
OPTIONS = {"model": MODEL, "messages": ASK, "max_retries": 0, "max_tokens": 300}


class Shape(BaseModel):
    """A thing that is seen."""

    model_config = ConfigDict(extra="forbid")  # else a small model may add fields without end

    color: Literal["red", "blue"]
    count: Literal[1, 2, 3]


def of(mode: instructor.Mode) -> Shape:
    client = instructor.from_openai(openai.OpenAI(base_url=V1, api_key=KEY), mode=mode)
    made = client.chat.completions.create(response_model=Shape, **OPTIONS)
    assert isinstance(made, Shape)
    return made


@case
def by_tool() -> None:
    of(instructor.Mode.TOOLS)


@case
def by_schema() -> None:
    of(instructor.Mode.JSON_SCHEMA)


@case
async def asynchronous() -> None:
    client = instructor.from_openai(
        openai.AsyncOpenAI(base_url=V1, api_key=KEY), mode=instructor.Mode.JSON_SCHEMA
    )
    assert isinstance(await client.chat.completions.create(response_model=Shape, **OPTIONS), Shape)


@case
def streamed_parts() -> None:
    client = instructor.from_openai(
        openai.OpenAI(base_url=V1, api_key=KEY), mode=instructor.Mode.JSON_SCHEMA
    )
    parts = list(client.chat.completions.create_partial(response_model=Shape, **OPTIONS))
    assert parts[-1].count in (1, 2, 3)


@case
def messages_by_tool() -> None:
    client = instructor.from_anthropic(
        anthropic.Anthropic(base_url=URL, api_key=KEY), mode=instructor.Mode.ANTHROPIC_TOOLS
    )
    assert isinstance(client.chat.completions.create(response_model=Shape, **OPTIONS), Shape)


main("instructor")
