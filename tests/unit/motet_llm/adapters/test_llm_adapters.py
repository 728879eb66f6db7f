"""Adapters in the engine: greedy tokens equal peft's, in any company, and what does not fit is refused by name."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from motet_llm.adapters.bank import AdapterBank, ResidentAdapter
from motet_llm.adapters.folder import WEIGHTS
from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.engine.outputs import StepOutput
from motet_shared.errors import BadRequest, ConfigError
from motet_shared.messages import Sampling
from support.checkpoints.language_checkpoints import tiny_checkpoint
from support.checkpoints.lora_folders import (
    change_config,
    change_tensors,
    make_adapter,
    with_adapter,
)
from support.families import language_families as families
from support.running.refusals import refuses

PROMPT = [5, 9, 13, 21, 34, 55, 89, 144, 5, 9, 13, 22, 7]
POCKET_CHAT = Path(__file__).parents[4] / "models" / "pocket-chat"
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
# What families of different make are adapted in: joined and single matrices, mixers, latent attention.
FAMILIES = {
    "Qwen3ForCausalLM": "all-linear",
    "Gemma2ForCausalLM": ATTENTION,
    "GptOssForCausalLM": ATTENTION,
    "DeepseekV3ForCausalLM": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
    "Qwen3NextForCausalLM": ["in_proj_qkvz", "out_proj", "q_proj"],
    "Qwen2MoeForCausalLM": ATTENTION,
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def make_engine(folder: Path, adapters: dict[str, Path], **options: Any) -> Engine:
    settings: dict[str, Any] = {
        "threads": 1,
        "dtype": "float32",
        "num_blocks": 200,
        "block_size": 4,
    }
    given = tuple(f"{name}={path}" for name, path in adapters.items())
    return Engine(
        EngineConfig(model=str(folder), adapters=given, **settings | {"context": 128} | options)
    )


def bank_of(engine: Engine) -> AdapterBank:
    assert engine.runner.adapters is not None
    return engine.runner.adapters


def loaded(engine: Engine) -> dict[str, ResidentAdapter]:
    """All of the engine's adapters, each in a slot of its own."""
    bank = bank_of(engine)
    return {name: bank.load(name, slot) for slot, name in enumerate(bank.names)}


def finish(engine: Engine) -> dict[Any, list[StepOutput]]:
    outputs: dict[Any, list[StepOutput]] = {}
    for _ in range(2000):
        if not engine.has_work:
            break
        for output in engine.step():
            outputs.setdefault(output.key, []).append(output)
    engine.check_integrity()
    assert engine.stats()["blocks_free"] == engine.stats()["blocks_total"]
    return outputs


def ids_of(outputs: list[StepOutput]) -> list[int]:
    assert outputs[-1].error is None
    return [token for output in outputs for token in output.ids]


def greedy(count: int = 12) -> Sampling:
    return Sampling(temperature=0, max_tokens=count, ignore_eos=True)


@torch.inference_mode()
def expected(model: Any, prompt: list[int], count: int = 12) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(
            int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax())
        )
    return tokens[len(prompt) :]


@pytest.mark.long(after=2)
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_pefts(name: str, tmp_path: Path) -> None:
    folder = families.write_checkpoint(name, tmp_path / "model")
    adapters = {
        "small": make_adapter(
            load(folder), tmp_path / "small", seed=1, target_modules=FAMILIES[name]
        ),
        "large": make_adapter(
            load(folder),
            tmp_path / "large",
            seed=2,
            r=9,
            use_rslora=True,
            target_modules=FAMILIES[name],
        ),
    }
    engine = make_engine(folder, adapters)
    held = loaded(engine)
    for key in (*adapters, None):
        engine.add(key, PROMPT, greedy(), adapter=held.get(key or ""))
    outputs = finish(engine)
    due = {
        key: expected(with_adapter(load(folder), path), PROMPT) for key, path in adapters.items()
    }
    due[None] = expected(load(folder), PROMPT)  # type: ignore[index]
    assert {key: ids_of(outputs[key]) for key in due} == due
    assert len(set(map(tuple, due.values()))) == len(due), "adapters this weak would prove nothing"
    engine.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("qwen3", tmp_path_factory.mktemp("model"), hidden_size=32)


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    configs: list[dict[str, Any]] = [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": r".*\.(k_proj|up_proj)"},
        {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {r"layers\.1\..*": 3}},
        {"target_modules": ["o_proj", "gate_proj"], "layers_to_transform": [1]},
    ]
    return {
        f"a{seed}": make_adapter(load(folder), root / f"a{seed}", seed=seed, r=2 + seed, **more)
        for seed, more in enumerate(configs)
    }


@pytest.fixture(scope="module")
def due(folder: Path, adapters: dict[str, Path]) -> dict[str, list[int]]:
    """What each adapter, and none, says to the prompt."""
    found = {
        name: expected(with_adapter(load(folder), path), PROMPT) for name, path in adapters.items()
    }
    return found | {"": expected(load(folder), PROMPT)}


@pytest.mark.parametrize(
    "options",
    [
        {"deterministic": True},
        {"num_blocks": 16, "token_budget": 8, "max_running": 6},
        {"overlap": False, "prefix_cache": False, "weights": "float32"},
    ],
    ids=str,
)
def test_a_mixed_batch_changes_nobody(
    folder: Path, adapters: dict[str, Path], due: dict[str, list[int]], options: dict[str, Any]
) -> None:
    """Preemptions, cancels, moves and shared beginnings among requests with and without adapters."""
    engine = make_engine(folder, adapters, decode_slowdown=0, **options)
    held = loaded(engine)
    rng = random.Random(1)
    wanted: dict[int, str] = {}
    ids: dict[int, list[int]] = {}
    for key in range(24):
        wanted[key] = rng.choice(list(due))
        ids[key] = list(due[wanted[key]][: rng.choice([0, 0, 5])])  # of a move
        engine.add(key, PROMPT, greedy(), output=list(ids[key]), adapter=held.get(wanted[key]))
        for _ in range(rng.choice([0, 1, 4])):
            for output in engine.step():
                ids[output.key] += output.ids  # type: ignore[index]
        if key % 7 == 6:
            engine.cancel(key)
            del wanted[key]
    for key, outputs in finish(engine).items():
        ids[key] += ids_of(outputs)
    assert {key: ids[key] for key in wanted} == {key: due[name] for key, name in wanted.items()}
    if "num_blocks" in options:
        assert engine.stats()["preemptions"] > 0
    engine.close()


def test_what_an_adapter_computed_is_found_by_it_alone(
    folder: Path, adapters: dict[str, Path]
) -> None:
    engine = make_engine(folder, adapters)
    held = loaded(engine)
    cached = []
    for key, name in enumerate(("", "a2", "a2", "a0", "", "a0")):
        engine.add(key, PROMPT, greedy(2), adapter=held.get(name))
        (usage,) = [output.usage for output in finish(engine)[key] if output.usage is not None]
        cached.append(usage.cached_tokens)
    assert cached == [0, 0, 12, 0, 12, 12]
    engine.close()


def test_steps_of_few_rows_are_replayed_with_adapters_too(
    folder: Path, adapters: dict[str, Path], due: dict[str, list[int]]
) -> None:
    engine = make_engine(folder, adapters, weights="float32")
    held = loaded(engine)
    for first, second in (("a0", "a2"), ("a2", ""), ("", ""), ("a1", "a1")):
        engine.add(1, PROMPT, greedy(), adapter=held.get(first))
        engine.add(2, PROMPT, greedy(), adapter=held.get(second))
        outputs = finish(engine)
        assert [ids_of(outputs[1]), ids_of(outputs[2])] == [due[first], due[second]]
    memories = engine.runner._memories
    assert {((1, 1), True), ((1, 1), False)} <= set(memories)
    assert all(len(memory._tapes) == 2 for memory in memories.values())
    engine.close()


def test_a_slot_takes_one_adapter_after_another(
    folder: Path, adapters: dict[str, Path], due: dict[str, list[int]]
) -> None:
    engine = make_engine(folder, adapters, max_adapters=1)
    assert bank_of(engine).slots == 1
    for name in ("a2", "a0", "a3", "a1", "a2"):
        engine.add(name, PROMPT, greedy(), adapter=bank_of(engine).load(name, 0))
        assert ids_of(finish(engine)[name]) == due[name]
    engine.close()


@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
def test_packed_weights_take_adapters(
    folder: Path, adapters: dict[str, Path], weights: str
) -> None:
    """They round; so it is the logits that are compared, with those of the same rounding without company."""
    engine = make_engine(folder, adapters, weights=weights)
    held = loaded(engine)
    outputs = []
    for keys in (("a2",), ("a2", "a0", "", "a2x")):
        for key in keys:
            sampling = Sampling(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
            engine.add(key, PROMPT, sampling, adapter=held.get(key.removesuffix("x")))
        outputs.append(finish(engine)["a2"])
    alone, mixed = (ids_of(one) for one in outputs)
    assert alone == mixed
    engine.add("free", PROMPT, greedy(8))
    assert ids_of(finish(engine)["free"]) != alone
    engine.close()


def test_the_language_part_of_a_model_that_sees(tmp_path: Path) -> None:
    whole = AutoModelForImageTextToText.from_pretrained(POCKET_CHAT, dtype=torch.float32).eval()
    path = make_adapter(
        whole, tmp_path / "talk", strength=0.2, target_modules=r".*language_model.*(q|v|down)_proj"
    )
    engine = make_engine(POCKET_CHAT, {"talk": path})
    engine.add("talk", PROMPT, greedy(6), adapter=bank_of(engine).load("talk", 0))
    engine.add("free", PROMPT, greedy(6))
    outputs = finish(engine)
    assert ids_of(outputs["free"]) == expected(whole, PROMPT, 6)
    assert (
        ids_of(outputs["talk"])
        == expected(with_adapter(whole, path), PROMPT, 6)
        != ids_of(outputs["free"])
    )
    engine.close()


# ------------------------------------------------------------------------------------------------------------- refusals
def _refused(tmp_path: Path, folder: Path, path: Path, **options: Any) -> str:
    """Why the engine does not serve it. Another one of the same engine goes on."""
    good = make_adapter(load(folder), tmp_path / "good", seed=5)
    engine = make_engine(folder, {"bad": path, "good": good}, **options)
    bank = bank_of(engine)
    with pytest.raises(BadRequest) as refusal:
        bank.load("bad", 0)
    engine.add(1, PROMPT, greedy(), adapter=bank.load("good", 0))
    assert ids_of(finish(engine)[1]) == expected(with_adapter(load(folder), good), PROMPT)
    engine.close()
    assert refusal.value.param == "model"
    return refusal.value.message


def test_an_adapter_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tiny_checkpoint("qwen3", tmp_path / "other")
    path = make_adapter(load(other), tmp_path / "bad")
    change_config(path, base_model_name_or_path="someone/other")
    message = _refused(tmp_path, folder, path)
    assert "adapter 'bad'" in message
    assert (
        "is [4, 64], must be [4, 32]: it is another model's (it was trained for 'someone/other')"
        in message
    )


def test_more_or_fewer_layers_are_named(folder: Path, tmp_path: Path) -> None:
    deeper = tiny_checkpoint("qwen3", tmp_path / "deep", hidden_size=32, num_hidden_layers=3)
    path = make_adapter(load(deeper), tmp_path / "bad", target_modules=["q_proj"])
    assert "model.layers.2.self_attn.q_proj cannot be adapted in this model" in _refused(
        tmp_path, folder, path
    )
    shallow = tiny_checkpoint("qwen3", tmp_path / "shallow", hidden_size=32, num_hidden_layers=1)
    path = make_adapter(load(shallow), tmp_path / "bad2", target_modules=["q_proj"])
    assert "lacks base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight" in _refused(
        tmp_path, folder, path
    )


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"use_dora": True}, "use_dora=True: DoRA scales whole matrices; train plain LoRA"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']"),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"peft_type": "IA3"}, "peft_type='IA3'; only LORA is served"),
        ({"r": 0}, "r=0; it must be a number above 0"),
        ({"r": 100}, "r=100 is above --max-rank=64; raise it"),
        ({"target_modules": ["nothing"]}, "this model has no such modules"),
        ({"target_modules": "(("}, "'(?:(()\\\\Z' is no regular expression"),
        ({"target_modules": None}, "target_modules=None"),
        ({"rank_pattern": {"q_proj": "x"}}, "rank_pattern['q_proj']='x'"),
    ],
    ids=str,
)
def test_what_a_config_switches_is_refused_by_name(
    folder: Path, adapters: dict[str, Path], tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    path = make_adapter(load(folder), tmp_path / "bad")
    change_config(path, **fields)
    engine = make_engine(folder, {"bad": path})
    with pytest.raises(BadRequest) as refusal:
        bank_of(engine).load("bad", 0)
    assert named in refusal.value.message
    engine.close()


def test_damaged_files_are_refused(folder: Path, tmp_path: Path) -> None:
    missing, extra, torn, nan = (
        make_adapter(load(folder), tmp_path / name) for name in ("m", "e", "t", "n")
    )
    change_tensors(missing, layers_0_self_attn_q_proj_lora_A_weight=None)
    change_tensors(extra, surprise=torch.zeros(2))
    (torn / WEIGHTS).write_bytes((torn / WEIGHTS).read_bytes()[:100])
    change_tensors(nan, layers_0_self_attn_q_proj_lora_A_weight=torch.full((4, 32), torch.nan))
    engine = make_engine(
        folder, {"missing": missing, "extra": extra, "torn": torn, "nan": nan, "none": tmp_path}
    )
    for name, said in (
        (
            "missing",
            "lacks base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight; save it again",
        ),
        ("extra", "has surprise beyond what target_modules name"),
        ("torn", f"{WEIGHTS} cannot be read"),
        ("nan", "q_proj.lora_A.weight holds NaN or infinity"),
        ("none", "adapter_config.json cannot be read"),
        ("unknown", "'unknown' is no adapter here; there are: nan, missing, extra, torn, none"),
    ):
        with pytest.raises(BadRequest) as refusal:
            bank_of(engine).load(name, 0)
        assert said in refusal.value.message
    engine.close()


def test_files_that_change_after_the_start_are_not_mixed_up(folder: Path, tmp_path: Path) -> None:
    path = make_adapter(load(folder), tmp_path / "one")
    engine = make_engine(folder, {"one": path})
    bank_of(engine).load("one", 0)
    change_tensors(path, layers_0_self_attn_q_proj_lora_A_weight=torch.ones(4, 32))
    with refuses(BadRequest, "model"):
        bank_of(engine).load("one", 0)
    engine.close()


def test_names_are_checked_at_the_start(folder: Path, adapters: dict[str, Path]) -> None:
    root = adapters["a0"].parent
    assert bank_of(make_engine(folder, {}, adapter_folder=str(root))).names == sorted(adapters)
    for given in (("a0",), ("=x",), ("x=a", "x=b"), (f"{folder.name}=a",)):
        with refuses(ConfigError, "adapters"):
            Engine(EngineConfig(model=str(folder), threads=1, adapters=given))
    with refuses(ConfigError, "adapter_folder"):
        Engine(EngineConfig(model=str(folder), threads=1, adapter_folder="/nowhere"))
    with pytest.raises(ConfigError) as raised:
        EngineConfig(model=str(folder), max_adapters=0)
    assert raised.value.param == "max_adapters"
