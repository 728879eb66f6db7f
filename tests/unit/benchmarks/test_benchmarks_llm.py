"""Test the benchmarks of the LLM engine, and run them on a tiny model."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path

import pytest

from benchmarks.engine import adapters, llm, speculation, switches, techniques
from benchmarks.engine.checkpoint import SHAPES, random_checkpoint
from benchmarks.engine.figures import Figures, decode_rate, ratio, targets, whole_rate
from benchmarks.engine.peers import LLAMA_PYTHON, VLLM_PYTHON
from benchmarks.engine.prompts import prompts_of
from benchmarks.engine.replay import Job, Limits, Served
from benchmarks.serving import engine_wire, serving
from benchmarks.serving.goodput import Trace
from benchmarks.serving.served_stack import letters
from benchmarks.support.measures import median_interval
from motet_kernels.runtime import native
from motet_kernels.runtime.build import ISAS
from motet_models.model_config import model_shape, read_config
from support.peers.public_models import KNOWN


def test_decoding_is_measured_while_all_sequences_run() -> None:
    # The second begins a second later and ends a second later; between 1 and 3 s two tokens of each arrive.
    times = [[0.0, 1.0, 2.0, 3.0], [1.0, 2.0, 3.0, 4.0]]
    assert decode_rate(times) == 2.0
    assert whole_rate(-1.0, times) == 8 / 5
    assert decode_rate([[0.0, 1.0], [2.0, 3.0]]) == 0.0


@pytest.mark.parametrize(
    "kind", ["amx", "avx512bf16", "avx512vnni", "avx512", "avx2", "scalar", "off"]
)
def test_the_automatic_type_follows_the_instruction_set(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        native, "supported", lambda: list(ISAS.values())
    )  # of another processor than this one
    monkeypatch.setenv("MOTET_NATIVE", kind)
    expected = "bfloat16" if kind in ("amx", "avx512bf16") else "float32"
    assert llm.transformers_dtype("auto") == expected
    assert llm.transformers_dtype("auto", "cuda") == "bfloat16"
    assert llm.transformers_dtype("float32") == "float32"


def figures(name: str, decode: dict[int, list[float]], prefill: list[float]) -> Figures:
    return Figures(name, decode=decode, prefill=prefill)


def test_targets_compare_rounds_with_the_best_of_the_named_peers() -> None:
    found = {
        "motet bf16": figures("motet bf16", {1: [10.0, 20.0, 30.0], 8: [30.0] * 3}, [100.0] * 3),
        "motet int8": figures("motet int8", {32: [300.0] * 3}, [1.0] * 3),
        "llama.cpp BF16": figures(
            "llama.cpp BF16", {1: [10.0, 10.0, 10.0], 8: [20.0] * 3}, [50.0] * 3
        ),
        "llama.cpp Q8_0": figures("llama.cpp Q8_0", {32: [100.0] * 3}, [1.0] * 3),
        "llama.cpp Q4_0": figures("llama.cpp Q4_0", {32: [250.0] * 3}, [1.0] * 3),
    }
    judged = {target.what: (target.value, target.met) for target in targets(found)}
    assert judged == {
        "motet bf16 / llama.cpp BF16, c=1": (2.0, True),
        "motet bf16 / llama.cpp BF16, c=8": (1.5, True),
        "motet bf16 / llama.cpp BF16, prefill": (2.0, True),
        "motet int8 / llama.cpp Q4_0, c=32": (1.2, False),
    }
    assert ratio([1.0, 9.0, 4.0], [1.0, 1.0, 2.0]) == 2.0


def test_the_cost_of_a_stack_in_front_of_an_engine_is_judged_by_pairs() -> None:
    found = engine_wire.Findings(
        rates={"motet": [98.0, 99.0, 50.0], "vllm": [100.0, 100.0, 100.0]},
        ttft={"motet": [[0.011, 0.5, 0.012], [0.013]], "vllm": [[0.010, 0.011], [0.010]]},
    )
    assert found.ratios == [0.98, 0.99, 0.5]
    assert found.added == pytest.approx([1.5, 3.0])
    rate, first = engine_wire.targets(found, engine_wire.Plan())
    assert (rate.value, rate.met) == (0.98, True)
    assert (first.value, first.met) == (pytest.approx(2.25), False)
    text = engine_wire.report(found, engine_wire.Plan())
    assert "Share of tokens/s 0.980 (95 % interval 0.500 to 0.990)" in text


def test_an_engine_that_is_not_there_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(VLLM_PYTHON, raising=False)
    engine_wire.main(["--quick", "--output", str(tmp_path / "engine_wire.json")])
    assert VLLM_PYTHON in capsys.readouterr().out
    assert not (tmp_path / "engine_wire.json").exists()


def test_median_intervals_cover_the_median_in_95_percent() -> None:
    draw = random.Random(0)
    assert median_interval([float(i) for i in range(1, 21)]) == (
        6.0,
        15.0,
    )  # the ranks of the tables
    assert median_interval([3.0, 1.0, 2.0]) == (1.0, 3.0)
    covered = [
        a <= 0 <= b
        for a, b in (median_interval([draw.gauss(0, 1) for _ in range(24)]) for _ in range(400))
    ]
    assert 0.93 <= statistics.mean(covered) <= 0.99


def test_traces_and_prompts_depend_on_their_seeds_alone() -> None:
    trace = Trace(seconds=5, prefix=8, prompt=4, output=4, limit=16, vocab=100)
    jobs = trace.jobs(4.0)
    assert jobs == trace.jobs(4.0)
    assert jobs != trace.jobs(4.1)
    assert all(
        2 <= job.output <= job.limit and len(job.prompt) + job.limit <= trace.longest
        for job in jobs
    )
    starts = [tuple(job.prompt[:8]) for job in trace.jobs(60.0)]
    shared = sum(starts.count(start) > 5 for start in starts) / len(starts)
    assert shared == pytest.approx(0.5, abs=0.1)
    prompts = prompts_of(1000)
    assert prompts(3, 4, 0) == prompts(3, 4, 0) != prompts(3, 4, 1)
    assert len({letters(16, number) for number in range(64)}) == 64


def test_limits_need_complete_replies() -> None:
    limits, job = Limits(ttft=1.0, itl=0.1), Job(10.0, [1], 3)
    assert limits.met(Served(job, [10.9, 11.0, 11.1]))
    assert not limits.met(Served(job, [10.9, 11.0]))
    assert not limits.met(Served(job, [11.1, 11.2, 11.3]))
    assert not limits.met(Served(job, [10.5, 10.6, 10.9]))
    assert [limits.lost(Served(job), now) for now in (10.9, 11.1)] == [False, True]
    assert limits.lost(Served(job, error="refused"), 10.0)


def test_the_shape_is_that_of_qwen3() -> None:
    known = KNOWN["Qwen3-0.6B"][3]
    assert {key: known[key] for key in SHAPES["qwen3-0.6b"] if key in known} == {
        key: value for key, value in SHAPES["qwen3-0.6b"].items() if key in known
    }


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


def test_checkpoints_are_generated_once(cache: Path) -> None:
    folder = random_checkpoint("tiny", cache)
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert random_checkpoint("tiny", cache) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert model_shape(read_config(folder)).vocab == SHAPES["tiny"]["vocab_size"]


@pytest.mark.extended("peers")
@pytest.mark.timeout(300)
def test_engines_are_compared(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (LLAMA_PYTHON, VLLM_PYTHON):
        monkeypatch.setenv(name, "/bin/false")
    engines = ["--engines", "motet bf16", "transformers generate", "llama.cpp Q4_0", "vllm"]
    output = ["--cache", str(cache), "--output", str(tmp_path / "llm.json")]
    llm.main(["--quick", "--threads", "1", "--dtype", "float32", *engines, *output])
    out = capsys.readouterr().out
    assert "| motet bf16 | 100% |" in out
    assert "| transformers generate, float32 | 100% |" in out  # the two compute the same model
    assert "llama.cpp Q4_0 is absent: llama-cpp-python and gguf are not installed" in out
    assert "vllm float32 is absent: vllm is not installed" in out
    findings = json.loads((tmp_path / "llm.json").read_text())["findings"]
    assert all(
        rate > 0
        for f in findings["figures"].values()
        for rates in f["decode"].values()
        for rate in rates
    )


@pytest.mark.long
def test_an_engine_is_measured_under_load(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = ["--only", "prefix-hit", "chunked-prefill", "goodput", "prefix-cost"]
    output = ["--cache", str(cache), "--output", str(tmp_path / "serving.json")]
    serving.main(["--quick", "--threads", "1", *only, *output])
    out = capsys.readouterr().out
    for what in (
        "TTFT saved by a prefix hit",
        "p99 ITL while",
        "goodput / ablation",
        "prefix cache without a hit",
    ):
        assert f"| {what}" in out
    found = json.loads((tmp_path / "serving.json").read_text())["findings"]
    assert len(found["prefix_cost"]) == serving.QUICK.pairs
    assert found["prefix_cost_of_first_use"]
    assert all(value["good"] > 0 for value in found["goodput"].values())


def test_every_switch_is_compared_with_its_alternative(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--cache", str(cache), "--output", str(tmp_path / "switches.json")]
    switches.main(["--quick", "--threads", "1", "--only", "cache", *output])
    findings = json.loads((tmp_path / "switches.json").read_text())["findings"]
    assert len(findings) == 4
    assert all(gain > 0 for finding in findings for gain in finding["gains"])
    assert capsys.readouterr().out.count("\n| prefix_cache, ") == 2


def test_constrained_replies_are_compared_with_free_ones(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--cache", str(cache), "--output", str(tmp_path / "techniques.json")]
    techniques.main(["--quick", "--threads", "1", *output])
    found = json.loads((tmp_path / "techniques.json").read_text())
    assert [finding["grammar"] for finding in found["findings"]] == [*techniques.GRAMMARS]
    for finding in found["findings"]:
        assert all(gain > 0 for gain in finding["gains"])
        assert finding["mask_ms"] > 0
        assert finding["step_ms"] > 0
        assert finding["compile_ms"] > 0
    assert capsys.readouterr().out.count("held / free at c=4") == len(found["findings"])


@pytest.mark.extended("peers")
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_stack_is_compared_with_its_engine(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--cache", str(cache), "--output", str(tmp_path / "serving.json")]
    serving.main(["--quick", "--threads", "1", "--only", "stack", *output])
    assert "| full stack / engine alone |" in capsys.readouterr().out
    assert all(
        rate > 0
        for pair in json.loads((tmp_path / "serving.json").read_text())["findings"]["full_stack"]
        for rate in pair
    )


def test_streams_with_drafts_are_compared_with_those_without(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--cache", str(cache), "--output", str(tmp_path / "speculation.json")]
    speculation.main(["--quick", "--streams", "2", "--temperatures", "0.8", *output])
    found = json.loads((tmp_path / "speculation.json").read_text())
    assert len(found["findings"]) == 4
    assert all(gain > 0 for finding in found["findings"] for gain in finding["gains"])
    assert all(finding["accepted"] <= finding["drafted"] for finding in found["findings"])
    assert "| n-gram, repeated text, temperature 0.8, c=2 |" in capsys.readouterr().out


def test_streams_with_adapters_are_compared_with_those_without(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--cache", str(cache), "--output", str(tmp_path / "adapters.json")]
    adapters.main(["--quick", "--threads", "1", "--rank", "3", *output])
    costs = json.loads((tmp_path / "adapters.json").read_text())["findings"]
    assert [cost["mix"] for cost in costs] == [mix.name for mix in (*adapters.MIXES, adapters.NONE)]
    assert all(gain > 0 for cost in costs for gain in cost["gains"])
    assert "4 adapters in one batch / the base model" in capsys.readouterr().out
