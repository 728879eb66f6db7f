"""LangChain, over OpenAI's chats, Responses and embeddings, and over Anthropic's Messages."""

from __future__ import annotations

from typing import Literal

from cases import ANSWER, KEY, MODEL, QUESTION, URL, V1, WISH, case, main
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

OPTIONS = {"base_url": V1, "api_key": KEY, "model": MODEL, "temperature": 0, "max_retries": 0}
model = ChatOpenAI(**OPTIONS)
claude = ChatAnthropic(
    base_url=URL, api_key=KEY, model=MODEL, temperature=0, max_tokens=80, max_retries=0
)


@tool
def draw(prompt: str) -> str:
    """Draw a picture."""
    return prompt


class Shape(BaseModel):
    """A thing that is seen."""

    color: Literal["red", "blue"]
    count: Literal[1, 2, 3]


@case
def invoke() -> None:
    made = model.invoke(QUESTION)
    assert ANSWER in made.content
    assert made.usage_metadata["total_tokens"] > 0


@case
def stream() -> None:
    assert ANSWER in "".join(chunk.content for chunk in model.stream(QUESTION))


@case
async def batch() -> None:
    assert len(await model.abatch([QUESTION, QUESTION])) == 2


@case
def bound_tool() -> None:
    (call,) = model.bind_tools([draw]).invoke(WISH, max_tokens=80).tool_calls
    assert "circle" in call["args"]["prompt"]


@case
def structured_output() -> None:
    assert isinstance(model.with_structured_output(Shape).invoke(QUESTION), Shape)


@case
def responses() -> None:
    made = ChatOpenAI(**OPTIONS, use_responses_api=True).invoke(QUESTION)
    assert ANSWER in made.text


@case
def embeddings() -> None:
    made = OpenAIEmbeddings(
        base_url=V1, api_key=KEY, model="pocket-embed", check_embedding_ctx_length=False
    )
    assert len(made.embed_documents(["red", "blue"])) == 2


@case
def messages() -> None:
    assert ANSWER in claude.invoke(QUESTION).content


@case
def messages_streamed() -> None:
    parts = [chunk.text for chunk in claude.stream(QUESTION)]
    assert ANSWER in "".join(parts)


@case
def messages_tool() -> None:
    (call,) = claude.bind_tools([draw]).invoke(WISH).tool_calls
    assert "circle" in call["args"]["prompt"]


main("langchain-openai")
