"""Pipecat and LiveKit Agents: their language model classes, and Pipecat's realtime client.

LiveKit's realtime client has tests of its own, in tests/e2e/test_voice_frameworks.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

from cases import ANSWER, KEY, MODEL, QUESTION, TOOL_SCHEMA, V1, WISH, case, main
from livekit.agents import llm
from livekit.plugins import openai as livekit_openai
from pipecat.adapters.schemas.function_schema import FunctionSchema
from pipecat.adapters.schemas.tools_schema import ToolsSchema
from pipecat.frames.frames import (
    Frame,
    LLMFullResponseEndFrame,
    LLMRunFrame,
    LLMTextFrame,
    TTSAudioRawFrame,
)
from pipecat.pipeline.pipeline import Pipeline
from pipecat.pipeline.worker import PipelineWorker
from pipecat.processors.aggregators.llm_context import LLMContext
from pipecat.processors.aggregators.llm_response_universal import LLMContextAggregatorPair
from pipecat.processors.frame_processor import FrameDirection, FrameProcessor
from pipecat.services.openai.llm import OpenAILLMService
from pipecat.services.openai.realtime.events import SessionProperties
from pipecat.services.openai.realtime.llm import OpenAIRealtimeLLMService
from pipecat.workers.runner import WorkerRunner

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


class Heard(FrameProcessor):
    """Keep what the service says: its text, and the bytes of its speech."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.speech = "", 0
        self.ended = asyncio.Semaphore(0)  # a permit for each response that has ended

    async def process_frame(self, frame: Frame, direction: FrameDirection) -> None:
        await super().process_frame(frame, direction)
        if isinstance(frame, LLMTextFrame):
            self.text += frame.text
        elif isinstance(frame, TTSAudioRawFrame):
            self.speech += len(frame.audio)
        elif isinstance(frame, LLMFullResponseEndFrame):
            self.ended.release()
        await self.push_frame(frame, direction)


async def converse(
    context: LLMContext, modality: str, tool: Any = None, responses: int = 1
) -> Heard:
    """Run a realtime session from a context until so many responses have ended."""
    properties = SessionProperties(output_modalities=[modality])
    service = OpenAIRealtimeLLMService(
        api_key=KEY,
        base_url=V1.replace("http", "ws", 1) + "/realtime",
        settings=OpenAIRealtimeLLMService.Settings(model=MODEL, session_properties=properties),
    )
    if tool is not None:
        service.register_function("draw", tool)
    heard, pair = Heard(), LLMContextAggregatorPair(context)
    worker = PipelineWorker(
        Pipeline([pair.user(), service, heard, pair.assistant()]), cancel_on_idle_timeout=False
    )
    runner = WorkerRunner(handle_sigint=False)
    await runner.add_workers(worker)
    running = asyncio.create_task(runner.run())
    await worker.queue_frames([LLMRunFrame()])
    for _ in range(responses):
        await asyncio.wait_for(heard.ended.acquire(), 30)
    await worker.cancel()
    await running
    return heard


@case
async def pipecat_realtime_text() -> None:
    heard = await converse(LLMContext([{"role": "user", "content": QUESTION}]), "text")
    assert ANSWER in heard.text, heard.text


@case
async def pipecat_realtime_speech() -> None:
    heard = await converse(LLMContext([{"role": "user", "content": QUESTION}]), "audio")
    assert ANSWER in heard.text, heard.text
    assert heard.speech > 24_000  # bytes: half a second


@case
async def pipecat_realtime_tool() -> None:
    asked: list[str] = []

    async def tool(params: Any) -> None:
        asked.append(params.arguments["prompt"])
        await params.result_callback({"drawn": True})

    schema = FunctionSchema(
        name="draw",
        description="Draw a picture.",
        properties=TOOL_SCHEMA["properties"],
        required=["prompt"],
    )
    tools = ToolsSchema(standard_tools=[schema])
    context = LLMContext([{"role": "user", "content": WISH}], tools=tools)
    await converse(context, "text", tool, responses=2)
    assert "circle" in asked[0], asked


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
