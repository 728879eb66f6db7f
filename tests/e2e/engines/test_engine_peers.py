"""vLLM and llama.cpp for real, each in its own environment, and Motet's engine: one chain of targets.

`MOTET_VLLM_PYTHON` and `MOTET_LLAMA_CPP_PYTHON` name the environments' interpreters (docs/engines.md says
how they are made); a part whose variable is not set is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest
from transformers import AutoModelForCausalLM

from e2e.engines.chains import (
    ENGINES,
    LONG,
    MODEL,
    PYTHONS,
    QUESTION,
    START,
    Moving,
    Streamed,
    ask,
    engine_of,
    generated,
    loads,
    needs,
    pythons,
    recorded,
    serving,
    stream,
    wait_for,
)
from e2e.stack import MotetStack, until
from motet_cli.deploy.large_model import GPUS, HOSTS, IMAGE, vllm_arguments
from support.checkpoints.gguf_files import write_qwen3
from support.checkpoints.lora_folders import make_adapter
from support.checkpoints.pocket_text import pocket_text
from support.clients.realtime_client import TRANSCRIPTION, one, sound, talking
from support.peers.engine_runs import EngineRuns

pytestmark = [pytest.mark.extended("peers"), pytest.mark.timeout(1500)]

ADAPTER = "pocket-tuned"
ANSWER = "A red circle, a blue square and a green star."
ADAPTED = ("motet", "vllm")  # serve the adapter
SCORING = ("motet", "vllm")  # return log-probabilities of prompts
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


@pytest.fixture(scope="module")
def runs() -> Iterator[EngineRuns]:
    yield from recorded()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotetStack]:
    """A chain of all engines that are there, in the order of `ENGINES`."""
    folder = tmp_path_factory.mktemp("peers")
    model = pocket_text(folder / MODEL)
    gguf = write_qwen3(model, folder / "pocket-text.gguf")
    adapter = make_adapter(
        AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        folder / ADAPTER,
        strength=0.05,
    )
    adapters = json.dumps([f"{ADAPTER}={adapter}"])
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
        if engine == "vllm" and "vllm" in pythons():
            text += "instances = 2\n"
        if engine in ADAPTED and (engine == "motet" or engine in pythons()):
            text += f"settings = {{ adapters = {adapters} }}\n"
    text += "[roles.tokenizer.settings]\nmax_moves = 8\n"
    (folder / "motet.toml").write_text(text)
    options = ("--config", str(folder / "motet.toml"), "--vad", "0")
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
    with MotetStack(folder, *options, env=env, start_seconds=START) as stack:
        for engine in pythons():
            wait_for(stack, engine)
        yield stack


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
    # Enough for the whitespace that a schema lets a model write.
    answer = ask(stack, engine, max_tokens=400, **fields)
    if (engine, kind) in REFUSED:
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unsupported_parameter")
        runs.note(kind, engine, f"`{error['param']}` refused")
        return
    (choice,) = answer.json()["choices"]
    text = "".join(choice["message"]["content"].split())
    if engine == "llama.cpp" and choice["finish_reason"] == "length":
        # Its grammar of a schema allows any whitespace, which a small model writes to the limit.
        assert text
        assert want.startswith(text)
        runs.note(kind, engine, "held, whitespace not bounded")
        return
    assert text == want
    runs.note(kind, engine, "yes")


@pytest.mark.parametrize("engine", ENGINES)
def test_prompt_log_probabilities(stack: MotetStack, runs: EngineRuns, engine: str) -> None:
    needs(engine)
    answer = ask(stack, engine, prompt_logprobs=1, max_tokens=1)
    if engine in SCORING:
        assert answer.status_code == 200
        (found, due) = (
            one.json()["prompt_logprobs"]
            for one in (answer, ask(stack, "motet", prompt_logprobs=1, max_tokens=1))
        )
        assert len(found) == len(due)
        assert found[0] is None
        for one, other in zip(found[1:], due[1:], strict=True):
            for token in one.keys() & other.keys():
                assert one[token]["logprob"] == pytest.approx(other[token]["logprob"], abs=0.3)
        runs.note("`prompt_logprobs`", engine, "yes")
        return
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "prompt_logprobs")
    runs.note("`prompt_logprobs`", engine, "refused")


@pytest.mark.parametrize("engine", ENGINES)
def test_adapters(stack: MotetStack, runs: EngineRuns, engine: str) -> None:
    """An adapter of random factors has the same effect as in Motet's engine."""
    needs(engine)
    asked = {"model": ADAPTER, "max_tokens": 24, "ignore_eos": True}
    answer = ask(stack, engine, **asked)
    if engine not in ADAPTED:
        assert answer.status_code in (400, 404)
        assert answer.json()["error"]["param"] in ("model", "motet-target")
        runs.note("LoRA adapters", engine, "refused")
        return
    assert answer.headers["motet-served-by"] == engine
    text = answer.json()["choices"][0]["message"]["content"]
    plain = ask(stack, engine, **{**asked, "model": MODEL}).json()
    assert text != plain["choices"][0]["message"]["content"]
    ours = ask(stack, "motet", **asked).json()
    assert text == ours["choices"][0]["message"]["content"]
    runs.note("LoRA adapters", engine, "yes")


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
    busy = ("running", "queued")
    until(
        lambda: not any(load.get(name) for load in loads(stack).values() for name in busy),
        "nothing runs on",
        60,
    )
    assert ask(stack, engine).json()["choices"][0]["message"]["content"] == ANSWER
    runs.note("cancel: queued, prefill, decode", engine, "yes")


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_spoken_turn(stack: MotetStack, runs: EngineRuns, engine: str) -> None:
    """A spoken question is heard, answered by the engine, and the answer spoken."""
    needs(engine)
    asked = {"model": "pocket-tts", "input": QUESTION, "response_format": "pcm", "seed": 1}
    async with httpx.AsyncClient(trust_env=False, timeout=120) as http:
        answer = await http.post(f"{stack.url}/v1/audio/speech", json=asked)
        assert answer.status_code == 200, answer.text
    url = stack.url.replace("http", "ws", 1) + f"/v1/realtime?model={MODEL}"
    audio: dict[str, Any] = {"input": {"turn_detection": None, "transcription": {}}}
    async with talking(
        url, {"motet-target": engine}, output_modalities=["audio"], audio=audio
    ) as client:
        before = generated(stack, engine)
        await client.audio(answer.content)
        await client.send("input_audio_buffer.commit")
        await client.until(f"{TRANSCRIPTION}.completed")
        await client.send("response.create")
        events = await client.until("response.done")
    response = events[-1]["response"]
    assert response["status"] == "completed", response["status_details"]
    spoken = one(events, "response.output_audio_transcript.done")["transcript"]
    heard = one(client.events, f"{TRANSCRIPTION}.completed")["transcript"]
    assert "circle" in heard
    assert spoken
    assert len(sound(events)) > 24_000  # half a second of 16 bits at 24 kHz
    until(lambda: generated(stack, engine) > before, f"{engine} has generated")
    runs.note("a spoken turn", engine, "yes")


# --------------------------------------------------------------------------- kill -9, in mid-stream
@pytest.fixture(scope="module")
def undisturbed(stack: MotetStack) -> list[int]:
    """Return the tokens of a long reply; greedily, all engines compute the same model."""
    want = Streamed()
    for _ in stream(stack, want, target="motet", ignore_eos=True, max_tokens=LONG):
        pass
    return want.ids


def test_a_reply_goes_on_at_another_host_of_the_same_engine(
    stack: MotetStack, runs: EngineRuns, undisturbed: list[int]
) -> None:
    needs("vllm")
    reply = Moving(stack, target="vllm")
    reply.at_tokens(10)
    dead = reply.kill("vllm")
    until(lambda: serving(stack, "vllm") != dead, "the reply runs at the other host")
    reply.finish(undisturbed)
    assert reply.path == ["vllm"]
    runs.note("`kill -9` in mid-stream: goes on at another host", "vllm", "yes")


@pytest.mark.parametrize("engine", ["vllm", "llama.cpp"])
def test_a_reply_goes_on_at_another_engine_and_comes_back(
    stack: MotetStack, runs: EngineRuns, undisturbed: list[int], engine: str
) -> None:
    """From ours to the other engine, where it is killed as soon as ours is up again, and back."""
    needs(engine)
    wait_for(stack, engine)
    if engine == "llama.cpp" and "vllm" in pythons():  # so that it is the next one of the chain
        for name in loads(stack, "vllm"):
            stack.kill(name)
    reply = Moving(stack)
    reply.at_tokens(10)
    reply.kill("motet")
    assert engine_of(serving(stack, engine)) == engine
    wait_for(stack, "motet")
    reply.kill(engine)
    reply.finish(undisturbed)
    assert reply.path == ["motet", engine, "motet"]
    wait_for(stack, engine)
    runs.note("`kill -9` in mid-stream: from Motet's engine to it, and back", engine, "yes")


@pytest.mark.parametrize("engine", ["vllm", "llama.cpp"])
def test_a_text_of_ours_is_continued(stack: MotetStack, runs: EngineRuns, engine: str) -> None:
    needs(engine)
    wait_for(stack, engine)
    found = Streamed()
    for _ in stream(stack, found, target="motet", max_tokens=6):
        pass
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": found.text},
    ]
    more = {"add_generation_prompt": False, "continue_final_message": True}
    answer = ask(stack, engine, messages=messages, **more)
    rest = answer.json()["choices"][0]["message"]["content"]
    assert found.text + rest == ANSWER
    runs.note("`continue_final_message`", engine, "yes")


READ = """
import json, sys
from vllm import __version__
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

args = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
names = "model_tag tensor_parallel_size pipeline_parallel_size nnodes node_rank master_addr headless"
print(json.dumps({"version": __version__, **{name: getattr(args, name) for name in names.split()}}))
"""


@pytest.mark.parametrize("rank", range(HOSTS))
def test_vllm_takes_the_arguments_of_the_manifests(rank: int) -> None:
    """Of the release that the manifests name; two hosts of GPUs are not at hand."""
    if not (python := os.environ.get(PYTHONS["vllm"])):
        pytest.skip(f"{PYTHONS['vllm']} is not set")
    argv = vllm_arguments("/models/x", str(rank), "192.0.2.1")
    done = subprocess.run(
        [python, "-c", READ, *argv], capture_output=True, text=True, check=True, timeout=300
    )
    read = json.loads(done.stdout.splitlines()[-1])
    assert IMAGE.endswith(f":v{read.pop('version').partition('+')[0]}")
    assert read == {
        "model_tag": "/models/x",
        "tensor_parallel_size": GPUS,
        "pipeline_parallel_size": HOSTS,
        "nnodes": HOSTS,
        "node_rank": rank,
        "master_addr": "192.0.2.1",
        "headless": rank > 0,
    }
