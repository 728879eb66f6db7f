"""The Triton kernels: on a GPU where there is one, else in Triton's interpreter on tensors of the CPU."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch

from motet_kernels import gpu

CUDA = torch.cuda.is_available()
# What takes more than five seconds in Triton's interpreter, or compiles everything: without a GPU it runs in
# `make extended PART=families`, the rest in `make test-long`.
SLOW = {
    "test_gpu_asr.py": (
        "test_whisper_computes_in_the_checkpoints_type[dtype1-auto]",
        "test_whisper_computes_in_the_checkpoints_type[dtype2-int8]",
        "test_whisper_says_what_it_says_on_the_cpu",
    ),
    "test_gpu_benchmark.py": ("test_the_benchmark_measures_every_noun",),
    "test_gpu_compile.py": ("test_every_kernel_compiles_and_is_documented",),
    "test_gpu_engine.py": (
        "test_experts_in_codes_say_nearly_what_they_say_on_the_cpu[int4]",
        "test_experts_in_codes_say_nearly_what_they_say_on_the_cpu[mxfp4]",
        "test_sixteen_bits_give_nearly_what_the_twins_give[bfloat16-int4]",
        "test_the_engine_says_what_it_says_on_the_cpu[DeepseekV3ForCausalLM-settings6]",
        "test_the_engine_says_what_it_says_on_the_cpu[Gemma2ForCausalLM-settings5]",
        "test_the_engine_says_what_it_says_on_the_cpu[Qwen3ForCausalLM-settings1]",
    ),
    "test_gpu_graphs.py": (
        "test_a_model_on_its_twins_is_launched",
        "test_a_step_that_no_graph_holds_is_launched",
        "test_adapters_are_launched",
        "test_drafts_are_launched",
        "test_every_size_replays_new_inputs",
        "test_replayed_steps_say_what_launched_steps_say[DeepseekV3ForCausalLM-settings3]",
        "test_replayed_steps_say_what_launched_steps_say[Gemma2ForCausalLM-settings2]",
        "test_replayed_steps_say_what_launched_steps_say[GptOssForCausalLM-settings4]",
        "test_replayed_steps_say_what_launched_steps_say[Qwen3ForCausalLM-settings1]",
        "test_rows_that_are_not_needed_touch_no_block",
    ),
    "test_gpu_tts.py": (
        "test_it_speaks_as_on_the_cpu[pocket_tts]",
        "test_it_speaks_as_on_the_cpu[speecht5]",
        "test_it_speaks_as_on_the_cpu[vits]",
        "test_sixteen_bits_give_nearly_what_the_modules_give[vits-0.05]",
    ),
}

if not CUDA:
    gpu.select("interpret")  # before anything imports Triton
    gpu.select("")


@pytest.hookimpl(tryfirst=True)  # before tiers are told apart
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests: with a GPU all need it; without one they are slow, in Triton's interpreter, but for compiling."""
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if CUDA:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.extended("gpu"))
        elif item.name in SLOW.get(item.path.name, ()):
            item.add_marker(pytest.mark.extended("families"))
        elif item.path.name != "test_gpu_compile.py":
            item.add_marker(pytest.mark.long)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a file, with the reason, whose imports this Python lacks, if this project is not installed in it.

    `make gpu` runs so on a machine without a network: packages are absent, and an older transformers lacks classes.
    """
    report = yield
    text = str(report.longrepr)
    if report.failed and "ImportError while importing" in text and not is_installed():
        reason = text.strip().rpartition("\n")[2].removeprefix("E").strip()
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 0, f"Skipped: {collector.path.name}: {reason}")
    return report


def is_installed() -> bool:
    """Whether this project is installed, and with it all that its tests import."""
    try:
        distribution("motet")
    except PackageNotFoundError:
        return False
    return True


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    """Where tensors lie that the kernels take; sizes are to be small where that is the CPU."""
    gpu.select("on" if CUDA else "interpret")
    yield torch.device("cuda" if CUDA else "cpu")
    gpu.select("")
