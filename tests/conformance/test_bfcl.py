"""bfcl-eval over HTTP, unmodified, with a scripted model that gives the right answers.

Its score is then 1 unless the gateway changes what is asked or answered: tools, their schemas,
parallel calls, arguments of every type, and results over several turns.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from conformance.environments import python_of
from conformance.outcome import record
from conformance.scripted_answers import Answers
from conformance.suites import PYTHON
from motet_shared.messages import ModelCard
from motet_shared.testing import NatsServer, running
from support.services.fake_services import FakeDecode, FakeTokenizer
from support.stages.served_gateway import KEY, Served, served_gateway

pytestmark = [
    pytest.mark.slow,
    pytest.mark.extended("conformance"),
    pytest.mark.timeout(1500),
]
# Models that bfcl-eval knows, by the protocol that it speaks with them.
MODELS = {"chats": "openbmb/MiniCPM-SALA-FC", "responses": "gpt-5.2-2025-12-11-FC"}
CATEGORIES = (
    "simple_python",
    "multiple",
    "parallel",
    "parallel_multiple",
    "irrelevance",
    "live_simple",
    "live_parallel",
    "multi_turn_base",
)
COUNT = 8  # questions of a category
SECONDS = 300


class _Tokenizer(FakeTokenizer):
    name = ""

    def models(self) -> list[ModelCard]:
        return [_card(self.name, tools=True)]


class _Decode(FakeDecode):
    name = ""

    def models(self) -> list[ModelCard]:
        return [_card(self.name)]


def _card(name: str, **more: Any) -> ModelCard:
    return ModelCard(name=name, context=2**17, created=1_750_000_000, **more)


@asynccontextmanager
async def serving(answers: Answers) -> AsyncIterator[str]:
    """Serve the scripted model by the name that has no alias; yield the base URL."""
    async with NatsServer() as nats:
        tokenizer = _Tokenizer(None, await nats.bus("tokenizer"))
        decode = _Decode(None, await nats.bus("decode"))
        tokenizer.name = decode.name = MODELS["chats"]
        tokenizer.reply = answers.reply
        async with running(tokenizer), running(decode), served_gateway(nats) as gateway:
            await gateway.bus.directory.wait_for(
                lambda d: d.ready("tokenizer") and d.ready("decode"), 15
            )
            yield f"{Served(gateway).url}/v1"


async def bfcl(python: Path, url: str, folder: Path, *argv: str) -> str:
    """Run a command of bfcl-eval; return what it prints."""
    env = {**os.environ, "BFCL_PROJECT_ROOT": str(folder), "HOME": str(folder), "NO_PROXY": "*"}
    env |= {"OPENAI_BASE_URL": url, "OPENAI_API_KEY": KEY}
    process = await asyncio.create_subprocess_exec(
        python,
        *("-m", "bfcl_eval", *argv),
        cwd=folder,
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()[-4000:]
    return output.decode()


def scores(folder: Path, model: str) -> dict[str, dict[str, Any]]:
    """Return the scores by category."""
    found = {}
    for path in (folder / "score" / model.replace("/", "_")).rglob("*_score.json"):
        category = path.stem.removeprefix("BFCL_v4_").removesuffix("_score")
        found[category] = json.loads(path.read_text().splitlines()[0])
    return found


async def test_bfcl(tmp_path: Path) -> None:
    python = await asyncio.to_thread(python_of, "bfcl")
    (data,) = python.parents[1].glob("lib/python*/site-packages/bfcl_eval/data")
    answers = Answers(data, CATEGORIES, COUNT)
    (tmp_path / "test_case_ids_to_generate.json").write_text(json.dumps(answers.ids))
    cases = {}
    async with serving(answers) as url:
        for protocol, model in MODELS.items():
            options = ("--model", model, "--run-ids", "--num-threads", "2")
            await bfcl(python, url, tmp_path, "generate", *options)
            options = ("--model", model, "--test-category", ",".join(CATEGORIES), "--partial-eval")
            output = await bfcl(python, url, tmp_path, "evaluate", *options)
            found = scores(tmp_path, model)
            for category in CATEGORIES:
                score = found.get(category, {})
                good = (score.get("accuracy"), score.get("total_count")) == (1.0, COUNT)
                cases[f"{protocol} {category}"] = "" if good else f"{score} {output[-200:]}"
    version = PYTHON["bfcl"][0].partition("==")[2]
    wrong = record("bfcl-eval", "bfcl-eval", version, cases, {})
    assert not wrong, wrong
