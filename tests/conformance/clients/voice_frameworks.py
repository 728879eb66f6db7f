"""Language model classes of Pipecat and LiveKit Agents; their realtime clients have tests of their own."""

from __future__ import annotations

from cases import ANSWER, KEY, MODEL, QUESTION, V1, WISH, case, main
from livekit.agents import llm
from livekit.plugins import openai as livekit_openai
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.services.openai.llm import OpenAILLMService

drawn: list[str] = []


@llm.function_tool
async def draw(prompt: str) -> str:
    """Draw a picture."""
    return prompt


@case
async def pipecat_inference() -> None:
    settings = OpenAILLMService.Settings(model=MODEL, temperature=0)
    service = OpenAILLMService(api_key=KEY, base_url=V1, settings=settings)
    context = LLMContext([{"role": "user", "content": QUESTION}])
    assert ANSWER in (await service.run_inference(context) or "")


@case
async def livekit_chat() -> None:
    model = livekit_openai.LLM(model=MODEL, base_url=V1, api_key=KEY, temperature=0)
    context = llm.ChatContext.empty()
    context.add_message(role="user", content=QUESTION)
    text = ""
    async with model.chat(chat_ctx=context) as stream:
        async for chunk in stream:
            text += (chunk.delta.content or "") if chunk.delta else ""
    assert ANSWER in text


@case
async def livekit_tool() -> None:
    model = livekit_openai.LLM(model=MODEL, base_url=V1, api_key=KEY, temperature=0)
    context = llm.ChatContext.empty()
    context.add_message(role="user", content=WISH)
    calls = []
    async with model.chat(chat_ctx=context, tools=[draw]) as stream:
        async for chunk in stream:
            calls += chunk.delta.tool_calls if chunk.delta else []
    assert "circle" in calls[0].arguments


main("pipecat-ai")
