"""Test the pocket-chat recipe at a small size, and the committed weights on text questions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from recipes.chat import talk as chat_talk  # noqa: E402
from recipes.chat import tools as chat_tools  # noqa: E402
from recipes.chat.evaluate import answer_questions, load, matches  # noqa: E402
from recipes.chat.recipe import Phase, Recipe  # noqa: E402
from recipes.chat.stream import (  # noqa: E402
    CATEGORIES,
    PER_CATEGORY,
    held_out,
    held_out_digests,
    training_conversation,
)
from recipes.chat.train import Trainer  # noqa: E402
from recipes.training.errors import RecipeError  # noqa: E402
from recipes.training.held_out_seeds import HELD_OUT_SEEDS  # noqa: E402
from recipes.training.loop import Schedule  # noqa: E402

FOLDER = Path(__file__).parents[3] / "models" / "pocket-chat"
TINY = Recipe(
    hidden=64,
    intermediate=128,
    layers=2,
    heads=2,
    kv_heads=1,
    tokenizer_conversations=200,
    phases=(Phase(start=0, batch=8), Phase(start=4, batch=6)),
    warmup=4,
)


@pytest.fixture(scope="module")
def committed():
    return load(FOLDER)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    trainer = Trainer(TINY, Schedule(steps=24, warmup=TINY.warmup))
    return trainer, losses(trainer, tmp_path_factory.mktemp("state"))


def losses(trainer: Trainer, folder: Path) -> list[float]:
    """Return the losses of a run to the end of the schedule."""
    return [report.loss for report in trainer.run(folder / "state.pt")]


# The stream


def test_a_conversation_is_a_function_of_seed_and_index() -> None:
    assert training_conversation(3, 14) == training_conversation(3, 14)
    assert training_conversation(3, 14) != training_conversation(3, 15)


def test_training_refuses_held_out_seeds() -> None:
    with pytest.raises(RecipeError) as refused:
        training_conversation(HELD_OUT_SEEDS.start + 5, 0)
    assert refused.value.param == "seed"


def test_training_never_meets_a_held_out_scene_or_question() -> None:
    assert len(held_out_digests()) > 2000
    for index in range(1000):
        assert not training_conversation(Recipe().seed, index).keys & held_out_digests()


def test_every_category_has_enough_held_out_questions() -> None:
    assert set(held_out()) == set(CATEGORIES)
    assert PER_CATEGORY >= 200
    for category, items in held_out().items():
        assert len(items) == PER_CATEGORY
        assert all(item.category == category for item in items)
        assert all(item.messages[-1]["role"] == "assistant" for item in items)


@given(st.integers(0, 2**32))
def test_sums_are_right(seed: int) -> None:
    _, text, answer = chat_talk.arithmetic(Random(seed))
    words = {word: number for number, word in enumerate(chat_talk.NUMBERS)}
    spaced = text.lower().replace("+", " + ").replace("-", " - ").rstrip("?.=").rstrip("?.= ")
    first, second = (
        int(word) if word.isdigit() else words[word]
        for word in spaced.split()
        if word.isdigit() or word in words
    )
    result = answer.lower().rstrip(".")
    if spaced.startswith("subtract"):
        first, second = second, first
    plus = any(sign in spaced.split() for sign in ("plus", "+", "sum", "add"))
    assert (int(result) if result.isdigit() else words[result]) == (
        first + second if plus else first - second
    )


def test_every_conversation_is_used_once() -> None:
    recipe = Recipe(
        phases=tuple(Phase(start=start, batch=batch) for start, batch in ((0, 4), (3, 2), (5, 3)))
    )
    indices = [index for step in range(8) for index in recipe.span(step)]
    assert indices == list(range(3 * 4 + 2 * 2 + 3 * 3))


@pytest.mark.parametrize("starts", [(), (1,), (0, 9, 5), (0, 3, 3)])
def test_phases_out_of_order_are_refused(starts: tuple[int, ...]) -> None:
    with pytest.raises(RecipeError) as refused:
        Recipe(phases=tuple(Phase(start=start, batch=4) for start in starts))
    assert refused.value.param == "phases"


# The recipe in small


def test_a_short_run_learns_and_loads(trained, tmp_path: Path) -> None:
    trainer, recorded = trained
    assert sum(recorded[-4:]) < 0.75 * sum(recorded[:4])
    trainer.export(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello!"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    generated = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert generated.shape[1] > prompt["input_ids"].shape[1]
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(
        ["<|im_end|>", "<|endoftext|>"]
    )


def test_same_seed_same_losses_even_across_a_restart(trained, tmp_path: Path) -> None:
    _, undisturbed = trained
    first = Trainer(TINY, Schedule(steps=3, warmup=TINY.warmup, decay=0.01))
    again = losses(first, tmp_path)
    resumed = Trainer(TINY, Schedule(steps=6, warmup=TINY.warmup, decay=0.01))
    resumed.load_state(tmp_path / "state.pt")
    again += losses(resumed, tmp_path)
    assert again == pytest.approx(undisturbed[:6], rel=1e-4)


def test_another_seed_gives_other_losses(trained, tmp_path: Path) -> None:
    _, undisturbed = trained
    other = Trainer(replace(TINY, seed=21), Schedule(steps=1, warmup=TINY.warmup))
    assert losses(other, tmp_path)[0] != undisturbed[0]


# The committed weights


def test_the_folder_is_small_and_complete(committed) -> None:
    model, _ = committed
    assert sum(parameter.numel() for parameter in model.parameters()) <= 12_000_000
    assert (FOLDER / "model.safetensors").stat().st_size < 10_000_000
    assert {path.name for path in FOLDER.iterdir()} >= {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
        *("processor_config.json", "preprocessor_config.json"),
    }
    assert json.loads((FOLDER / "config.json").read_text())["architectures"] == [
        "LlavaForConditionalGeneration"
    ]


@given(text=st.text())
def test_any_text_round_trips_through_the_tokenizer(committed, text: str) -> None:
    _, tokenizer = committed
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_special_and_tool_tokens_are_single_tokens(committed) -> None:
    _, tokenizer = committed
    for token in ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>"):
        assert len(tokenizer.encode(token, add_special_tokens=False)) == 1
    ids = tokenizer.encode("<|im_start|><tool_call>", add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<tool_call>"


def test_the_template_renders_tools_calls_and_responses(committed) -> None:
    _, tokenizer = committed
    tool = chat_tools.draw_tool(Random(0))
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Draw a star."}]},
        chat_tools.draw_call("a star"),
        {"role": "tool", "content": "ok"},
    ]
    text = tokenizer.apply_chat_template(
        messages, tools=[tool], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n\n")
    assert f"<tools>\n{json.dumps(tool, ensure_ascii=False)}\n</tools>" in text
    assert "<|im_start|>user\nDraw a star.<|im_end|>\n" in text
    assert (
        '<tool_call>\n{"name": "draw", "arguments": {"prompt": "a star"}}\n</tool_call><|im_end|>\n'
        in text
    )
    assert "<|im_start|>user\n<tool_response>\nok\n</tool_response><|im_end|>\n" in text
    assert text.endswith("<|im_start|>assistant\n")
    as_text = [*messages[:2], json.loads(json.dumps(messages[2])), messages[3]]
    as_text[2]["tool_calls"][0]["function"]["arguments"] = '{"prompt": "a star"}'
    assert text == tokenizer.apply_chat_template(
        as_text, tools=[tool], tokenize=False, add_generation_prompt=True
    )


def test_tool_calls_are_compared_as_json() -> None:
    right = '<tool_call>\n{"name": "draw", "arguments": {"prompt": "a star"}}\n</tool_call>'
    assert matches(
        '<tool_call>{"arguments": {"prompt": "a star"}, "name": "draw"}</tool_call>', right
    )
    assert not matches(right.replace("a star", "a circle"), right)
    assert not matches("<tool_call>\n{oops\n</tool_call>", right)


def test_the_committed_weights_answer_held_out_questions(committed) -> None:
    model, tokenizer = committed
    answers = [
        answer
        for items in held_out().values()
        for answer in answer_questions(model, tokenizer, items[:20], batch=20)
    ]
    wrong = [answer for answer in answers if not answer.correct]
    assert len(wrong) <= 0.1 * len(answers), [(one.item.category, one.text) for one in wrong]
