"""Conversations with tools in each dialect through the tokenizer service: a call, its result, and the next turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.families.chat_templates import family
from support.stages.tokenizer_stage import TOOL, chat, stage_in_memory

ARGUMENTS = {"shape": "star", "label": "a <b> é"}
BODY = json.dumps(ARGUMENTS, ensure_ascii=False)
NAMED = f'{{"name": "draw", "arguments": {BODY}}}'
# By family: what the model writes between its text and the end token.
CALLS = {
    "chatml": f"<tool_call>\n{NAMED}\n</tool_call>",
    "qwen3": f"<tool_call>\n{NAMED}\n</tool_call>",
    "mistral": f"[TOOL_CALLS] [{NAMED}]",
    "phi": f"<|tool_call|>[{NAMED}]<|/tool_call|>",
    "granite": f"<|tool_call|>[{NAMED}]",
    "deepseek": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>draw\n```json\n{BODY}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "glm": "<tool_call>draw\n<arg_key>shape</arg_key>\n<arg_value>star</arg_value>\n"
    "<arg_key>label</arg_key>\n<arg_value>a <b> é</arg_value>\n</tool_call>",
    "harmony": f"<|start|>assistant<|channel|>commentary to=functions.draw <|constrain|>json<|message|>{BODY}",
}


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_and_its_result(name: str, tmp_path: Path) -> None:
    one = family(name)
    text = "<|channel|>commentary<|message|>I draw.<|end|>" if name == "harmony" else "I draw."
    script = [*one.ids(text + CALLS[name]), one.tokenizer.eos_token_id]
    async with stage_in_memory(one.write_folder(tmp_path)) as stage:
        assert stage.tokenizer.models()[0].tools
        decode = await stage.decode(script)
        answer = await stage.ask(chat(tools=[TOOL]))
        assert (answer.text, answer.end.status) == ("I draw.", "tool_calls")
        assert [(call, json.loads(arguments)) for call, arguments in answer.calls] == [
            ("draw", ARGUMENTS)
        ]
        identity = next(d.id for item in answer.items for d in item.tools or () if d.id)
        decode.script = [*one.ids("Done."), one.tokenizer.eos_token_id]
        for call_id in (identity, "call_0123456789abcdef01234567"):
            history = messages(call_id, answer.calls[0])
            assert (await stage.ask(chat(messages=history, tools=[TOOL]))).text == "Done."


def messages(call_id: str, call: tuple[str, str]) -> list[dict[str, Any]]:
    """What a client sends after a call: the reply as it came, and the result."""
    function = {"name": call[0], "arguments": call[1]}
    return [
        {"role": "user", "content": "Draw."},
        {
            "role": "assistant",
            "content": "I draw.",
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call_id, "name": "draw", "content": "drawn"},
    ]
