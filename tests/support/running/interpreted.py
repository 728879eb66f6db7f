"""Name the tests of `tests/kernels/gpu` that `make test-long` leaves out on a machine without a GPU.

They take more than five seconds in Triton's interpreter, and run in `make extended PART=families`; on
a GPU all run in `PART=gpu`.
"""

from __future__ import annotations

# file: names of tests, with the case of a parametrized one
SLOW = {
    "test_gpu_asr.py": (
        "test_whisper_computes_in_the_checkpoints_type[dtype1-auto]",
        "test_whisper_computes_in_the_checkpoints_type[dtype2-int8]",
        "test_whisper_says_what_it_says_on_the_cpu",
    ),
    "test_gpu_benchmark.py": ("test_the_benchmark_measures_every_noun",),
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
