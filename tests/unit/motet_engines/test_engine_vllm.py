"""The host's side of vLLM: parameters, outputs, grammars and errors. vLLM itself runs in `make extended`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from motet_cli.engines.environment import host_command, host_variables
from motet_engines.config import EnginesConfig
from motet_engines.engine import Features
from motet_engines.grammars import added_tokens, with_token_ids
from motet_engines.pictures import Picture
from motet_engines.vllm.adapters import read_adapters
from motet_engines.vllm.arguments import engine_arguments, split_arguments
from motet_engines.vllm.engine import VllmEngine
from motet_engines.vllm.library import Library, load_library
from motet_engines.vllm.load import LoadReader
from motet_engines.vllm.pictures import PictureInput, picture_features
from motet_engines.vllm.sampling import sampling_params, structured
from motet_media.pool import Pool
from motet_media.worker import ENTRY, JobLimits
from motet_shared.errors import (
    BadRequest,
    ConfigError,
    ContextTooLong,
    PayloadTooLarge,
    Unavailable,
)
from motet_shared.messages import Chat, Generate, Grammar, Sampling, ScoredToken
from support.checkpoints.tiny_tokenizers import write_folder
from support.media.picture_files import encoded, pattern
from support.running.refusals import refuses


class Arguments:
    """Parse what the host sets, as vLLM's class does."""

    @staticmethod
    def add_cli_args(parser: Any) -> Any:
        for name in ("model", "dtype", "scheduling-policy", "structured-outputs-config"):
            parser.add_argument(f"--{name}")
        for name in ("max-model-len", "max-lora-rank", "max-loras", "max-cpu-loras"):
            parser.add_argument(f"--{name}", type=int)
        parser.add_argument("--enable-lora", action="store_true")
        return parser

    @staticmethod
    def from_cli_args(found: argparse.Namespace) -> argparse.Namespace:
        return found


class Dead(Exception):
    """Stand for vLLM's EngineDeadError."""


class Refused(ValueError):
    """Stand for an error of vLLM about a request."""

    parameter = "top_k"


LIBRARY = Library(
    async_llm=None,
    engine_args=Arguments,
    argument_parser=argparse.ArgumentParser,
    sampling_params=lambda **fields: SimpleNamespace(**fields),
    structured_outputs=lambda **fields: fields,
    lora_request=lambda *fields: fields,
    delta="delta",
    client_errors=(ValueError,),
    dead=Dead,
)


@dataclass
class Scripted:
    """Yield outputs like `AsyncLLM.generate`, then raise `error`."""

    outputs: list[Any]
    error: Exception | None = None
    asked: list[Any] = field(default_factory=list)
    closed: int = 0

    async def generate(self, *asked: Any, **named: Any) -> AsyncGenerator[Any, None]:
        self.asked.append((asked, named))
        try:
            for output in self.outputs:
                yield output
            if self.error is not None:
                raise self.error
        finally:
            self.closed += 1


def output(
    ids: list[int], finish: str | None = None, logprobs: Any = None, scores: Any = None
) -> Any:
    completion = SimpleNamespace(token_ids=ids, finish_reason=finish, logprobs=logprobs)
    return SimpleNamespace(outputs=[completion], num_cached_tokens=2, prompt_logprobs=scores)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"))


def engine_of(folder: Path, scripted: Scripted, **settings: Any) -> VllmEngine:
    config = EnginesConfig(engine="vllm", model=str(folder), metrics_port=-1, **settings)
    engine = VllmEngine(config)
    engine._library, engine._engine = LIBRARY, scripted
    return engine


def request(max_tokens: int = 10, model: str = "tiny", **fields: Any) -> Generate:
    sampling = Sampling(max_tokens=max_tokens, **fields.pop("sampling", {}))
    return Generate(model=model, prompt=[5, 6], sampling=sampling, **fields)


def adapter(folder: Path, **config: Any) -> str:
    """Write the config of an adapter; return the entry of the setting."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return f"{folder.name}={folder}"


async def collect(engine: VllmEngine, asked: Generate) -> list[Any]:
    return [one async for one in engine.generate("key", asked, None)]


async def test_a_reply_goes_on_where_another_instance_left_it(folder: Path) -> None:
    scripted = Scripted([output([9]), output([10, 11], "length")])
    sampling = {"seed": 3, "min_tokens": 4, "stop_token_ids": [2], "top_k": 7}
    asked = request(6, output=[7, 8], sampling=sampling, priority=1)
    found = await collect(engine_of(folder, scripted), asked)
    assert [one.ids for one in found] == [[9], [10, 11]]
    assert (found[-1].finish, found[-1].cached_tokens) == ("length", 2)
    ((prompt, params, key), named) = scripted.asked[0]
    assert (prompt["prompt_token_ids"], key, named["priority"]) == ([5, 6, 7, 8], "key", -1)
    assert (params.max_tokens, params.min_tokens, params.seed) == (4, 2, 5)
    assert (params.stop_token_ids, params.top_k, params.output_kind) == ([2], 7, "delta")


async def test_leaving_a_reply_aborts_it(folder: Path) -> None:
    scripted = Scripted([output([9]), output([10])])
    outputs = engine_of(folder, scripted).generate("key", request(), None)
    await anext(outputs)
    await outputs.aclose()
    assert scripted.closed == 1


async def test_log_probabilities_are_those_of_the_chosen_tokens(folder: Path) -> None:
    ranks = {
        4: SimpleNamespace(logprob=-0.5, rank=1),
        9: SimpleNamespace(logprob=-2.0, rank=3),
        3: SimpleNamespace(logprob=-1.0, rank=2),
    }
    scripted = Scripted([output([9], "stop", [ranks])])
    (found,) = await collect(engine_of(folder, scripted), request(sampling={"logprobs": 2}))
    (entry,) = found.logprobs
    assert (entry.id, entry.logprob, entry.top) == (9, -2.0, [(4, -0.5), (3, -1.0)])


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_prompts_are_scored_but_for_their_first_token(folder: Path, max_tokens: int) -> None:
    """Also where no token is wanted, of which vLLM draws at least one."""
    ranks = {6: SimpleNamespace(logprob=-2.0, rank=3), 4: SimpleNamespace(logprob=-0.5, rank=1)}
    scripted = Scripted([output([9], "length", scores=[None, ranks])])
    asked = request(max_tokens, sampling={"prompt_logprobs": 1})
    (found,) = await collect(engine_of(folder, scripted), asked)
    assert found.scores == [ScoredToken(6, -2.0, 3, [(4, -0.5)])]
    assert (found.ids, found.finish) == ([9][:max_tokens], "length")
    params = scripted.asked[0][0][1]
    assert (params.max_tokens, params.prompt_logprobs) == (1, 1)


async def test_a_reply_that_goes_on_has_had_its_scores(folder: Path) -> None:
    scripted = Scripted([output([9], "length", scores=[None])])
    asked = request(2, output=[8], sampling={"prompt_logprobs": 1})
    (found,) = await collect(engine_of(folder, scripted), asked)
    assert found.scores is None
    assert scripted.asked[0][0][1].prompt_logprobs is None


async def test_what_vllm_refuses_is_the_clients_error_and_what_breaks_moves(folder: Path) -> None:
    with refuses(BadRequest, "top_k"):
        await collect(engine_of(folder, Scripted([], Refused("no"))), request())
    for scripted in (Scripted([], Dead()), Scripted([output([1], "abort")])):
        with pytest.raises(Unavailable):
            await collect(engine_of(folder, scripted), request())


def test_arguments_reach_vllm_except_those_that_the_host_sets(folder: Path) -> None:
    def parsed(text: str, **settings: Any) -> Any:
        given = EnginesConfig(engine="vllm", model=str(folder), engine_args=text, **settings)
        return engine_arguments(LIBRARY, given)

    found = parsed("--dtype bfloat16 --scheduling-policy fcfs", context=32)
    assert (found.model, found.dtype, found.max_model_len) == (str(folder), "bfloat16", 32)
    assert found.scheduling_policy == "fcfs"
    assert parsed("").scheduling_policy == "priority"
    for text in ("--model x", "--trust_remote_code", "--no-such", "'"):
        with refuses(ConfigError, "engine_args"):
            parsed(text)
    assert split_arguments("--a 'b c'") == ["--a", "b c"]


async def test_an_adapter_is_named_in_the_request(folder: Path, tmp_path: Path) -> None:
    given = (adapter(tmp_path / "first", r=4), adapter(tmp_path / "second", r=4))
    scripted = Scripted([output([9], "stop")])
    engine = engine_of(folder, scripted, adapters=given)
    for model in ("tiny", "second"):
        await collect(engine, request(model=model))
    loras = [named["lora_request"] for _, named in scripted.asked]
    assert loras == [None, ("second", 2, str(tmp_path / "second"))]


def test_vllm_has_room_for_the_adapters(folder: Path, tmp_path: Path) -> None:
    given = (
        adapter(tmp_path / "plain", r=4),
        adapter(tmp_path / "larger", r=8, rank_pattern={"q_proj": 20}),
    )

    def parsed(text: str, entries: tuple[str, ...]) -> Any:
        config = EnginesConfig(
            engine="vllm", model=str(folder), engine_args=text, adapters=entries, metrics_port=-1
        )
        return engine_arguments(LIBRARY, config, read_adapters(entries, "tiny").values())

    found = parsed("", given)
    assert (found.enable_lora, found.max_lora_rank) == (True, 32)
    assert (found.max_loras, found.max_cpu_loras) == (2, 2)
    assert parsed("--max-loras 1", given).max_loras == 1
    assert not parsed("", ()).enable_lora
    with refuses(ConfigError, "engine_args"):
        parsed("--lora-modules a=b", given)


def test_adapters_that_cannot_be_served_are_refused(folder: Path, tmp_path: Path) -> None:
    good = adapter(tmp_path / "good", r=4)
    wrong = [
        ["good"],
        [good, good],
        ["tiny=" + str(tmp_path / "good")],
        [f"none={tmp_path / 'none'}"],
        [adapter(tmp_path / "empty")],
        [adapter(tmp_path / "words", r="many")],
    ]
    for entries in wrong:
        with refuses(ConfigError, "adapters"):
            read_adapters(entries, "tiny")
    huge = (adapter(tmp_path / "huge", r=1024),)
    config = EnginesConfig(engine="vllm", model=str(folder), metrics_port=-1, adapters=huge)
    with refuses(ConfigError, "adapters"):
        engine_arguments(LIBRARY, config, read_adapters(huge, "tiny").values())
    with refuses(ConfigError, "adapters"):
        EnginesConfig(
            engine="openai",
            model=str(folder),
            engine_url="http://127.0.0.1:9/v1",
            adapters=(good,),
            metrics_port=-1,
        )


class Renderer:
    """Put `tokens` tokens into a prompt in place of its mark, as vLLM's renderer does."""

    def __init__(self, tokens: int):
        self.tokens = tokens
        self.asked: list[Any] = []

    async def render_cmpl_async(self, prompts: list[Any]) -> list[Any]:
        self.asked += prompts
        ids = [
            one
            for number in prompts[0]["prompt_token_ids"]
            for one in [number] * (self.tokens if number == MARK else 1)
        ]
        return [{"type": "multimodal", "prompt_token_ids": ids}]

    def get_mm_processor(self) -> Any:
        return SimpleNamespace(info=SimpleNamespace(allowed_mm_limits={"image": 4}))


MARK = 6


def seeing(folder: Path, scripted: Scripted, tokens: int = 4) -> VllmEngine:
    engine = engine_of(folder, scripted)
    described: Any = scripted
    described.renderer = Renderer(tokens)
    described.model_config = SimpleNamespace(max_model_len=32, is_multimodal_model=True)
    engine._pictures = PictureInput(scripted, 10_000)
    return engine


def shown(data: bytes, max_pixels: int = 0) -> list[Picture]:
    return [Picture(data, max_pixels, "messages[0]")]


async def test_pictures_are_decoded_and_their_tokens_counted(folder: Path) -> None:
    scripted = Scripted([output([9], "length")])
    engine, file = seeing(folder, scripted), encoded(pattern(60, 40))
    chat = Chat(model="tiny", messages=[], sampling=Sampling(), max_context=10)
    asked = request(100, output=[7], chat=chat)
    (found,) = [one async for one in engine.generate("key", asked, None, shown(file, 600))]
    assert found.prompt_tokens == 5
    ((prompt, params, _), _) = scripted.asked[0]
    assert prompt["prompt_token_ids"] == [5, *[MARK] * 4, 7]
    assert params.max_tokens == 4  # of ten, five are the prompt and one was sent
    (given,) = engine._engine.renderer.asked
    (image,) = given["multi_modal_data"]["image"]
    assert (image.mode, image.size) == ("RGB", (30, 20))
    assert given["prompt_token_ids"] == [5, MARK, 7]


async def test_pictures_that_cannot_be_shown_are_refused_by_name(folder: Path) -> None:
    async def ask(data: bytes, tokens: int = 4) -> None:
        engine = seeing(folder, Scripted([]), tokens)
        _ = [one async for one in engine.generate("key", request(), None, shown(data))]

    with refuses(BadRequest, "messages[0]"):
        await ask(b"no picture")
    with refuses(PayloadTooLarge, "messages[0]"):
        await ask(encoded(pattern(200, 100)))
    with refuses(ContextTooLong, "messages"):
        await ask(encoded(pattern(8, 8)), tokens=40)


def test_models_and_releases_without_pictures_are_known() -> None:
    features = Features()
    config = SimpleNamespace(is_multimodal_model=True)
    sees: Any = SimpleNamespace(model_config=config, renderer=Renderer(1))
    assert picture_features(sees, features) == features
    older = SimpleNamespace(model_config=config, renderer=None)
    text = SimpleNamespace(model_config=SimpleNamespace(is_multimodal_model=False))
    assert [picture_features(one, features) for one in (older, text)] == [None, None]


def test_pictures_are_decoded_in_an_environment_without_our_packages(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A child starts by the script that knows where they are, as in vLLM's environment."""
    _, script = host_command("")
    libraries = str(Path(msgspec.__file__).parents[1])
    for name, value in {**host_variables(), ENTRY: script, "PYTHONPATH": libraries}.items():
        monkeypatch.setenv(name, value)
    python = tmp_path / "python"  # -S: what is installed for editing is not importable
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    decoder = Pool("motet_media.picture", 1)
    try:
        limits = JobLimits(10.0, 60.0, 1 << 30)
        data = encoded(pattern(8, 6))
        args: dict[str, int | str] = {"max_pixels": 100, "param": "image"}
        ((meta, _),) = decoder.run("picture", data, limits, BadRequest, **args)
    finally:
        decoder.close()
    assert (meta["width"], meta["height"]) == (8, 6)


def test_without_vllm_the_environment_is_named() -> None:
    with refuses(ConfigError, "engine_python"):
        load_library()


def test_grammars_name_added_tokens_by_id(folder: Path) -> None:
    lark = 'start: "<call>" part "\\n</call>" /<call>/\npart: %json {"enum": ["<call>"]} "<b>"'
    assert with_token_ids(lark, {"<call>": 5, "</call>": 6}) == (
        'start: <[5]> part ("\\n" <[6]>) /<call>/\npart: %json {"enum": ["<call>"]} "<b>"'
    )
    assert with_token_ids('start: "a"', {"<call>": 5}) == 'start: "a"'
    tokens = added_tokens(folder)
    assert all(name[0] == "<" and name[-1] == ">" for name in tokens)
    assert added_tokens(folder / "none") == {}


def test_kinds_of_grammars_have_their_fields() -> None:
    def of(kind: Any, text: str, **fields: str) -> Any:
        return structured(LIBRARY, Grammar(kind=kind, text=text, **fields), {"<t>": 3})

    (schema,) = of("json_schema", '{"type": "object"}').values()
    assert json.loads(schema).keys() == {"type", "x-guidance"}  # of little whitespace
    with refuses(BadRequest, "json_schema"):
        of("json_schema", "[]")
    assert of("regex", "a+") == {"regex": "a+"}
    assert of("choice", '["a"]') == {"choice": ["a"]}
    assert of("grammar", 'root ::= "<t>"') == {"grammar": 'root ::= "<t>"'}
    assert of("grammar", 'start: "<t>"') == {"grammar": "start: <[3]>"}
    framed = of("regex", "a+", frame='start: "<t>" @answer')
    assert framed["grammar"].startswith("start: <[3]> framed_answer")
    params = sampling_params(LIBRARY, request(), {})
    assert (params.structured_outputs, params.logprobs) == (None, None)


def test_the_load_is_that_of_all_engines_of_vllm() -> None:
    reader = LoadReader()
    assert reader.load() == {}
    for index, used in enumerate((0.5, 0.0)):
        stats = SimpleNamespace(num_running_reqs=2, num_waiting_reqs=1, kv_cache_usage=used)
        reader.factory(None, index).record(stats, None, None, index)
    assert reader.load() == {"running": 4.0, "queued": 2.0, "kv_free": 0.75}
