"""openai-agents: agents that speak Responses, or chats."""

from __future__ import annotations

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from cases import ANSWER, KEY, MODEL, QUESTION, V1, WISH, case, main
from openai import AsyncOpenAI

set_tracing_disabled(True)
SETTINGS = ModelSettings(temperature=0, max_tokens=80)
drawn: list[str] = []


@function_tool
def draw(prompt: str) -> str:
    """Draw a picture."""
    drawn.append(prompt)
    return "done"


def agent(kind: type, **fields: object) -> Agent:
    # Of its own, since each case has an event loop of its own.
    client = AsyncOpenAI(base_url=V1, api_key=KEY, max_retries=0)
    model = kind(model=MODEL, openai_client=client)
    return Agent(name="Assistant", model=model, model_settings=SETTINGS, **fields)


@case
async def responses() -> None:
    assert ANSWER in (await Runner.run(agent(OpenAIResponsesModel), QUESTION)).final_output


@case
async def responses_streamed() -> None:
    running = Runner.run_streamed(agent(OpenAIResponsesModel), QUESTION)
    kinds = {event.type async for event in running.stream_events()}
    assert "raw_response_event" in kinds
    assert ANSWER in running.final_output


@case
async def responses_tool() -> None:
    drawn.clear()
    await Runner.run(agent(OpenAIResponsesModel, tools=[draw]), WISH, max_turns=4)
    assert drawn


@case
async def chat() -> None:
    assert ANSWER in (await Runner.run(agent(OpenAIChatCompletionsModel), QUESTION)).final_output


@case
async def chat_tool() -> None:
    drawn.clear()
    await Runner.run(agent(OpenAIChatCompletionsModel, tools=[draw]), WISH, max_turns=4)
    assert drawn


@case
async def handoff_is_offered() -> None:
    other = agent(OpenAIResponsesModel, handoff_description="Knows colours.")
    found = await Runner.run(agent(OpenAIResponsesModel, handoffs=[other]), QUESTION, max_turns=4)
    assert found.final_output


main("openai-agents")
