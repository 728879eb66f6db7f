"""What evaluation harnesses send, answered by a gateway, a tokenizer and an engine, as transformers would.

The checkpoint has one token per byte, and tokens to fill in the middle.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from motet_gateway.config import GatewayConfig
from motet_gateway.context import GatewayContext
from motet_gateway.http.app import App
from motet_llm.config import DecodeConfig
from motet_llm.service import Decode
from motet_shared.process.telemetry import Metrics
from motet_shared.testing import MemoryHub, memory_bus, running, settle
from motet_tokenizer.config import TokenizerConfig
from motet_tokenizer.service import Tokenizer
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.clients.gateway_client import Http

MODEL = "tiny"
BOUND = 1e-4  # between log-probabilities in float32
PROMPT = "The red circle is left of the blue square; three small stars are above it. " * 4
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
Ask = Any


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("tiny")
    tiny_checkpoint("llama", path, hidden_size=32, head_dim=8, vocab_size=272)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_special_tokens({"additional_special_tokens": [*FIM]})
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@asynccontextmanager
async def stack(folder: Path) -> AsyncIterator[App]:
    hub = MemoryHub()
    options: dict[str, Any] = {
        "num_blocks": 200,
        "block_size": 8,
        "token_budget": 64,
        "max_running": 8,
    }
    decode = DecodeConfig(
        model=str(folder), name=MODEL, threads=1, metrics_port=-1, dtype="float32", **options
    )
    async with AsyncExitStack() as exits:
        bus = await memory_bus(hub, "gateway")
        exits.push_async_callback(bus.close)
        actors = (
            Decode(decode, await memory_bus(hub, "decode")),
            Tokenizer(
                TokenizerConfig(model=(f"{MODEL}={folder}",)), await memory_bus(hub, "tokenizer")
            ),
        )
        for actor in actors:
            await exits.enter_async_context(running(actor))
            await settle()
        yield App(GatewayContext(GatewayConfig(), bus, Metrics("gateway", bus.instance)))


@pytest.fixture
async def ask(folder: Path) -> AsyncIterator[Ask]:
    async with stack(folder) as app:

        async def asked(path: str = "completions", *, status: int = 200, **fields: Any) -> Http:
            body = json.dumps({"model": MODEL} | fields).encode()
            http = Http(app, path if path.startswith("/") else f"/v1/{path}", body)
            await asyncio.wait_for(http.task, 60)
            assert http.status == status, http.body
            return http

        yield asked


@torch.inference_mode()
def logprobs_of(reference: Any, ids: list[int]) -> torch.Tensor:
    logits = reference(torch.tensor([ids]), use_cache=False).logits[0].float()
    return torch.as_tensor(logits.log_softmax(-1))


def assert_echoed(reference: Any, ids: list[int], entries: dict[str, Any], most: int) -> None:
    rows = logprobs_of(reference, ids)
    values, tops = entries["token_logprobs"], entries["top_logprobs"]
    assert len(entries["tokens"]) == len(values) == len(tops) == len(entries["text_offset"])
    assert values[0] is None
    assert tops[0] is None
    for row, token, value, top in zip(rows, ids[1:], values[1:], tops[1:], strict=False):
        assert value == pytest.approx(float(row[token]), abs=BOUND)
        assert max(top.values()) == pytest.approx(float(row.max()), abs=BOUND)
        assert len(top) <= most


async def test_echo_with_log_probabilities(ask: Ask, reference: Any) -> None:
    ids = list(PROMPT.encode())
    for _ in range(2):  # the second one would find its prompt in the prefix cache
        http = await ask(prompt=PROMPT, max_tokens=1, logprobs=3, echo=True, temperature=0)
        (choice,) = http.json()["choices"]
        assert choice["text"].startswith(PROMPT)
        assert_echoed(reference, ids, choice["logprobs"], 3)
        assert len(choice["logprobs"]["tokens"]) == len(ids) + 1
    assert choice["logprobs"]["tokens"][: len(ids)] == list(PROMPT)
    assert choice["logprobs"]["text_offset"][:3] == [0, 1, 2]


async def test_a_stop_token_has_an_entry_behind_the_prompt(ask: Ask, reference: Any) -> None:
    """lm-eval leaves the last entry out, whatever it is."""
    ids = list(PROMPT.encode())
    row = logprobs_of(reference, ids)[-1]
    options: dict[str, Any] = {"max_tokens": 1, "logprobs": 1, "temperature": 0}
    stop = {"stop_token_ids": [int(row.argmax())]}
    (choice,) = (await ask(prompt=PROMPT, echo=True, **options, **stop)).json()["choices"]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "stop")
    values = choice["logprobs"]["token_logprobs"]
    assert len(values) == len(ids) + 1
    assert values[-1] == pytest.approx(float(row.max()), abs=BOUND)


async def test_a_prompt_alone_is_scored(ask: Ask, reference: Any) -> None:
    ids = list(PROMPT.encode())
    texts: dict[str, Any] = {"max_tokens": 0, "logprobs": 1, "echo": True}
    http = await ask(prompt=[ids, ids[:40], ids[:1]], **texts)
    choices = http.json()["choices"]
    assert [choice["text"] for choice in choices] == [PROMPT, PROMPT[:40], PROMPT[:1]]
    assert [choice["finish_reason"] for choice in choices] == ["length"] * 3
    for choice, size in zip(choices, (len(ids), 40, 1), strict=True):
        assert len(choice["logprobs"]["tokens"]) == size
        assert_echoed(reference, ids[:size], choice["logprobs"], 1)
    assert http.json()["usage"]["completion_tokens"] == 0
    (silent,) = (await ask(prompt=PROMPT, max_tokens=0)).json()["choices"]
    assert (silent["text"], silent["logprobs"], silent["finish_reason"]) == ("", None, "length")


async def test_a_stream_has_the_same_entries(ask: Ask) -> None:
    fields = {"prompt": PROMPT, "max_tokens": 4, "logprobs": 2, "echo": True, "temperature": 0}
    (whole,) = (await ask(**fields)).json()["choices"]
    events = [e for e in (await ask(**fields, stream=True)).events() if e != "[DONE]"]
    pieces = [event["choices"][0] for event in events]
    assert "".join(piece["text"] for piece in pieces) == whole["text"]
    for name, values in whole["logprobs"].items():
        parts = [piece["logprobs"][name] for piece in pieces if piece["logprobs"] is not None]
        found = [value for part in parts for value in part]
        if name in ("tokens", "text_offset"):
            assert found == values
        else:
            assert len(found) == len(values)


async def test_prompt_logprobs(ask: Ask, reference: Any) -> None:
    ids = list(PROMPT.encode())
    http = await ask(prompt=PROMPT, max_tokens=2, prompt_logprobs=2, return_token_ids=True)
    (choice,) = http.json()["choices"]
    first, *entries = choice["prompt_logprobs"]
    assert first is None
    assert choice["prompt_token_ids"] == ids
    assert len(choice["token_ids"]) == 2
    assert choice["logprobs"] is None
    for row, token, entry in zip(logprobs_of(reference, ids), ids[1:], entries, strict=False):
        own = entry[str(token)]
        assert own["logprob"] == pytest.approx(float(row[token]), abs=BOUND)
        assert own["decoded_token"] == chr(token)
        assert 2 <= len(entry) <= 3
        best = min(entry.values(), key=lambda one: one["rank"])
        assert (best["rank"], best["logprob"]) == (1, pytest.approx(float(row.max()), abs=BOUND))
    assert len(entries) == len(ids) - 1


async def test_chats(ask: Ask, folder: Path, reference: Any) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    fields = {"messages": messages, "max_tokens": 3, "prompt_logprobs": 0, "n": 2}
    body = (await ask("chat/completions", **fields, return_token_ids=True)).json()
    prompt = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    assert body["prompt_token_ids"] == prompt
    assert [len(choice["token_ids"]) for choice in body["choices"]] == [3, 3]
    rows = logprobs_of(reference, prompt)
    found = [next(iter(entry.values()))["logprob"] for entry in body["prompt_logprobs"][1:]]
    expected = [float(row[token]) for row, token in zip(rows, prompt[1:], strict=False)]
    assert found == pytest.approx(expected, abs=BOUND)


async def test_stop_token_ids(ask: Ask) -> None:
    fields = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "return_token_ids": True}
    (free,) = (await ask(**fields)).json()["choices"]
    stop = free["token_ids"][3]
    cut = free["token_ids"].index(stop) + 1
    (choice,) = (await ask(**fields, stop_token_ids=[stop])).json()["choices"]
    assert choice["token_ids"] == free["token_ids"][: cut - 1]  # the stop token is left out
    assert choice["finish_reason"] == "stop"
    events = (await ask(**fields, stream=True)).events()[:-1]
    pieces = [event["choices"][0] for event in events]
    assert [i for one in pieces for i in one.get("token_ids", [])] == free["token_ids"]
    assert pieces[0]["prompt_token_ids"] == list(PROMPT.encode())
    error = (await ask(status=400, **fields, stop_token_ids=[10**6])).json()["error"]
    assert error["param"] == "stop_token_ids"


async def test_a_gap_is_filled(ask: Ask, folder: Path, reference: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = f"{FIM[0]}def red({FIM[1]}): pass{FIM[2]}"
    ids = tokenizer(prompt)["input_ids"]
    fields = {"max_tokens": 5, "temperature": 0, "return_token_ids": True}
    (choice,) = (await ask(prompt="def red(", suffix="): pass", **fields)).json()["choices"]
    assert choice["prompt_token_ids"] == ids
    expected = reference.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False)
    made = expected[0, len(ids) :].tolist()
    assert choice["token_ids"] == made[: len(choice["token_ids"])]
    error = (await ask(status=400, prompt=[5, 6], suffix="x")).json()["error"]
    assert error["param"] == "suffix"


async def test_guided_names(ask: Ask) -> None:
    fields: dict[str, Any] = {"prompt": "x", "max_tokens": 20}
    (choice,) = (await ask(**fields, guided_choice=["left", "right"])).json()["choices"]
    assert choice["text"] in ("left", "right")
    (choice,) = (await ask(**fields, guided_regex="[0-9]{3}")).json()["choices"]
    assert choice["text"].isdigit()
    assert len(choice["text"]) == 3
    both: dict[str, Any] = {"guided_regex": "a", "structured_outputs": {"regex": "b"}}
    assert (await ask(status=400, **fields, **both)).json()["error"]["param"] == "guided_regex"


async def test_prompts_are_tokenized_and_written_again(ask: Ask) -> None:
    text, ids = "stars: ★", list("stars: ★".encode())
    found = (await ask("/tokenize", prompt=text, return_token_strs=True)).json()
    assert (found["tokens"], found["count"]) == (ids, len(ids))
    assert found["token_strs"][:3] == ["s", "t", "a"]
    assert found["max_model_len"] > len(ids)
    assert (await ask("/detokenize", tokens=ids)).json() == {"prompt": text}
    said = [{"role": "user", "content": "Hi"}]
    chat = (await ask("/tokenize", messages=said, add_generation_prompt=True)).json()
    assert chat["token_strs"] is None
    reply = (await ask("chat/completions", messages=said, max_tokens=1)).json()
    assert chat["count"] == reply["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": "x" * 100_000}, "prompt"),
        ("/detokenize", {"tokens": [1 << 40]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 10_000}, "tokens"),
    ],
)
async def test_prompts_that_are_not_tokenized(
    ask: Ask, path: str, fields: dict[str, Any], param: str
) -> None:
    error = (await ask(path, status=400, **fields)).json()["error"]
    assert error["param"] == param
