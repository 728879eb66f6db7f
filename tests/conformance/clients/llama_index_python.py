"""LlamaIndex, with its model class for servers that are like OpenAI's."""

from __future__ import annotations

from typing import Literal

from cases import ANSWER, KEY, MODEL, QUESTION, V1, WISH, case, main
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

model = OpenAILike(
    model=MODEL,
    api_base=V1,
    api_key=KEY,
    is_chat_model=True,
    is_function_calling_model=True,
    temperature=0,
    max_tokens=80,
    max_retries=0,
)


def draw(prompt: str) -> str:
    """Draw a picture."""
    return prompt


class Shape(BaseModel):
    """A thing that is seen."""

    color: Literal["red", "blue"]
    count: Literal[1, 2, 3]


@case
def complete() -> None:
    assert ANSWER in model.complete(QUESTION).text


@case
def chat() -> None:
    made = model.chat([ChatMessage(role="user", content=QUESTION)])
    assert ANSWER in (made.message.content or "")


@case
def chat_streamed() -> None:
    stream = model.stream_chat([ChatMessage(role="user", content=QUESTION)])
    assert ANSWER in "".join(part.delta or "" for part in stream)


@case
async def chat_async() -> None:
    made = await model.achat([ChatMessage(role="user", content=QUESTION)])
    assert ANSWER in (made.message.content or "")


@case
def tool_call() -> None:
    made = model.chat_with_tools([FunctionTool.from_defaults(draw)], user_msg=WISH)
    (call,) = model.get_tool_calls_from_response(made)
    assert "circle" in call.tool_kwargs["prompt"]


@case
def structured_output() -> None:
    whole = OpenAILike(**{**model.dict(), "api_key": KEY, "should_use_structured_outputs": True})
    made = whole.as_structured_llm(Shape).complete(QUESTION)
    assert isinstance(made.raw, Shape)


main("llama-index-llms-openai-like")
