"""Test the lessons that widen pocket-chat: pictures of other styles, calls of tools, JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from recipes.chat.calls import abilities_conversation, calling_conversation  # noqa: E402
from recipes.chat.choices import alike_skills, choosing_conversation  # noqa: E402
from recipes.chat.data import Conversation  # noqa: E402
from recipes.chat.mix import FINISHING, Mix  # noqa: E402
from recipes.chat.objects import object_conversation, repeating_conversation  # noqa: E402
from recipes.chat.records import COMMA_WEIGHT, record_conversation, shares  # noqa: E402
from recipes.chat.spelling import pieces, respelled  # noqa: E402
from recipes.chat.talk import ABILITY  # noqa: E402
from recipes.see import styled  # noqa: E402
from recipes.see.adapt import (  # noqa: E402
    LessonStream,
    TowerAdapter,
    WholeTrainer,
    average,
    lesson_batch,
    load,
    save,
)
from recipes.see.batches import packed, pixels, unpacked  # noqa: E402
from recipes.see.data import KINDS, is_held_out_scene  # noqa: E402
from recipes.see.mix import SEEING  # noqa: E402
from recipes.see.recipe import Adaptation  # noqa: E402
from recipes.see.styled import lesson, styled_conversation, styled_scene  # noqa: E402
from recipes.see.train import Model  # noqa: E402
from recipes.training.errors import RecipeError  # noqa: E402
from recipes.training.held_out_seeds import HELD_OUT_SEEDS  # noqa: E402
from recipes.training.loop import Stage  # noqa: E402
from recipes.world.pictures import SIZE  # noqa: E402
from recipes.world.scenes import SHAPES, Thing  # noqa: E402
from recipes.world.styles import (  # noqa: E402
    LEAST_PIXELS,
    REACH,
    Figure,
    Slant,
    Style,
    arrange,
    distance,
    in_own_cell,
    own_cells,
    paint,
    reaches,
    sample_pictured_scene,
    sample_style,
)


@pytest.mark.parametrize("shape", SHAPES)
def test_distances_are_negative_inside_and_grow_outside(shape: str) -> None:
    x = np.linspace(-2, 2, 41)
    found = distance(shape, x[None, :], x[:, None], Style())
    assert found[20, 20] < 0
    assert (found[np.hypot(x[None, :], x[:, None]) > REACH[shape] + 0.1] > 0).all()
    assert found[0, 0] > found[5, 5]


@pytest.mark.parametrize("softness", [0.0, 1.5])
def test_a_figure_is_painted_where_it_stands(softness: float) -> None:
    canvas = np.full((60, 120, 3), 255.0)
    thing = Thing(shape="square", colour="red")
    style = Style(width=120, height=60, softness=softness, outline=0.2)
    paint(canvas, Figure(thing, 0.25, 0.5, 12.0), (200, 0, 0), (0, 0, 0), style)
    assert canvas[30, 30].tolist() == [200, 0, 0]
    assert canvas[30, 90].tolist() == [255, 255, 255]
    shades = len(np.unique(canvas[..., 1]))
    assert shades == 2 if not softness else shades > 2


@pytest.mark.parametrize(("proportional", "wide"), [(True, True), (False, False)])
def test_a_proportional_shape_is_squeezed_by_the_model_and_not_in_the_picture(
    proportional: bool, wide: bool
) -> None:
    style = Style(width=160, height=80, proportional=proportional, softness=0.0)
    canvas = np.full((80, 160, 3), 255.0)
    thing = Thing(shape="circle", colour="red")
    paint(canvas, Figure(thing, 0.5, 0.5, 10.0), (200, 0, 0), (0, 0, 0), style)
    rows, columns = np.nonzero(canvas[..., 1] == 0)
    across, down = np.ptp(columns) + 1, np.ptp(rows) + 1
    assert (abs(across - down) <= 1) == wide
    assert (abs(across - 2 * down) <= 2) != wide


@pytest.mark.parametrize("anywhere", [False, True])
def test_things_find_room(anywhere: bool) -> None:
    rng = Random(2)
    shared = 0
    for _ in range(80):
        scene, style = sample_pictured_scene(rng), sample_style(rng)
        assert 24 <= min(style.width, style.height) <= max(style.width, style.height) <= 1024
        figures = arrange(scene.things, rng, style, anywhere=anywhere) or ()
        assert len({(one.thing.column, one.thing.row) for one in figures}) == len(figures)
        for figure in figures:
            assert in_own_cell(figure) or anywhere
            shared += not in_own_cell(figure)
            assert figure.radius * min(style.units) >= LEAST_PIXELS - 1e-9
            across, down = reaches(figure.thing, figure.radius, style)
            assert across <= min(figure.x, 1 - figure.x)
            assert down <= min(figure.y, 1 - figure.y)
    assert bool(shared) == anywhere


def test_of_two_figures_in_one_cell_the_one_further_from_its_middle_moves_to_the_next() -> None:
    star, circle = Thing(shape="star", colour="red"), Thing(shape="circle", colour="blue")
    first, second = own_cells([Figure(star, 0.24, 0.1, 3.0), Figure(circle, 0.12, 0.13, 3.0)])
    assert (second.thing.column, second.thing.row) == (0, 0)
    assert (first.thing.column, first.thing.row) == (1, 0)
    assert [first.thing.shape, second.thing.shape] == ["star", "circle"]
    assert in_own_cell(second)
    assert not in_own_cell(first)


def test_lessons_are_a_function_of_their_number_and_leave_held_out_scenes_out() -> None:
    seed = Adaptation().seed
    one, same = lesson(seed, 3), lesson(seed, 3)
    assert one.picture.shape == one.plain.shape == (SIZE, SIZE, 3)
    assert (one.picture == same.picture).all()
    assert 0 < one.kinds.max() < len(KINDS)
    scenes = [styled_scene(Random(number)).scene for number in range(40)]
    assert not any(len(s.things) > 1 and is_held_out_scene(s) for s in scenes)
    assert max(len(scene.things) for scene in scenes) > 4
    with pytest.raises(RecipeError):
        lesson(HELD_OUT_SEEDS.start, 0)


def test_conversations_about_other_styles_have_a_picture_per_part() -> None:
    made = [styled_conversation(Random(number), SEEING) for number in range(12)]
    for found in filter(None, made):
        parts = [
            part
            for message in found.conversation.messages
            if isinstance(message["content"], list)
            for part in message["content"]
            if part["type"] == "image"
        ]
        assert len(parts) == len(found.pictures) > 0


def test_nothing_is_asked_about_positions_where_two_things_share_a_cell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only = replace(SEEING, scene={"where": 1.0, "count": 1.0})
    drawn = iter(each for number in range(400) if not (each := styled_scene(Random(number))).exact)
    monkeypatch.setattr(styled, "styled_scene", lambda *_, **options: next(drawn))
    for number in range(12):
        found = styled_conversation(Random(number), only)
        for message in found.conversation.messages if found else ():
            assert message["role"] != "assistant" or not message["content"].startswith("At the")


MAKERS = [calling_conversation, choosing_conversation]


@pytest.mark.parametrize("make", MAKERS)
def test_calls_name_a_declared_tool_and_its_fields(
    make: Callable[[Random, Mix], Conversation],
) -> None:
    for number in range(60):
        conversation = make(Random(number), FINISHING)
        declared = {tool["function"]["name"]: tool["function"] for tool in conversation.tools}
        for index, message in enumerate(conversation.messages):
            for call in message.get("tool_calls", ()):
                name, arguments = call["function"]["name"], call["function"]["arguments"]
                assert set(arguments) == set(declared[name]["parameters"]["properties"])
                said = conversation.messages[index - 1]["content"]
                assert all(str(value) in said for value in arguments.values())


@pytest.mark.parametrize("make", MAKERS)
def test_composed_tools_are_told_apart_and_their_values_have_the_declared_types(
    make: Callable[[Random, Mix], Conversation],
) -> None:
    types = {"integer": int, "string": str}
    names: set[str] = set()
    for number in range(80):
        conversation = make(Random(number), FINISHING)
        declared = {tool["function"]["name"]: tool["function"] for tool in conversation.tools}
        assert len(declared) == len(conversation.tools)
        assert len(declared) == 1 or all(
            "draw" in d or "description" in declared[d] for d in declared
        )
        names.update(declared)
        for message in conversation.messages:
            for call in message.get("tool_calls", ()):
                fields = declared[call["function"]["name"]]["parameters"]["properties"]
                for field, value in call["function"]["arguments"].items():
                    assert isinstance(value, types[fields[field]["type"]])
    assert len(names) > 60


def test_tools_that_are_alike_share_a_word_and_a_request_names_what_differs() -> None:
    shared = 0
    for number in range(60):
        skills = alike_skills(Random(number), 2)
        first, second = (set(skill.name.split("_")) for skill in skills)
        shared += bool(first & second)
        assert first != second
        for skill in skills:
            assert all(f"{{{field}}}" in text for field in skill.fields for text in skill.requests)
    assert shared > 10


def test_each_of_several_tools_is_called_first_and_numbers_come_in_both_places_and_types() -> None:
    first_called: set[int] = set()
    numbers: set[bool | str] = set()
    for number in range(150):
        conversation = choosing_conversation(Random(number), FINISHING)
        names = [tool["function"]["name"] for tool in conversation.tools]
        calls = [m["tool_calls"][0]["function"] for m in conversation.messages if "tool_calls" in m]
        if len(names) > 1:
            first_called.add(names.index(calls[0]["name"]))
        for call in calls:
            values = list(call["arguments"].values())
            if len(values) == 2 and {type(one) for one in values} == {int, str}:
                numbers.add(isinstance(values[0], int))
            numbers.update("text" for one in values if isinstance(one, str) and one.isdigit())
    assert first_called >= {0, 1, 2}
    assert numbers == {True, False, "text"}


def test_a_reply_that_repeats_is_no_target_before_it_ends(model: Model) -> None:
    recipe = Adaptation()
    stage = Stage(steps=1, batch=40, matrix_lr=1e-3, other_lr=1e-3)
    stream = LessonStream(
        recipe, stage, model.tokenizer, model.llava.config.image_token_index, {"repeating": 40}
    )
    for number in range(40):
        conversation, told = repeating_conversation(Random(number), FINISHING)
        reply = conversation.messages[-1]["content"]
        json.loads(reply)
        assert set(reply[told:]) <= set('"]}')
        row = stream.row(number)
        target = model.tokenizer.decode(
            [one for one, weight in zip(row.ids, row.weights, strict=True) if weight == 1.0]
        )
        assert target.endswith("}<|im_end|>")
        assert len(target) < 20


@pytest.mark.parametrize("number", range(6))
def test_what_the_model_can_do_is_told_in_full(number: int) -> None:
    conversation = abilities_conversation(Random(number), FINISHING)
    assert ABILITY in [message["content"] for message in conversation.messages]
    assert all(word in ABILITY for word in ("see", "count", "sum", "draw", "tool"))


def test_replies_in_json_are_short() -> None:
    for number in range(80):
        reply = object_conversation(Random(number), FINISHING).messages[-1]
        assert reply["role"] == "assistant"
        json.loads(reply["content"])
        assert len(reply["content"]) < 900


def test_some_replies_in_json_copy_what_the_request_tells() -> None:
    copied = 0
    for number in range(80):
        *_, asked, reply = object_conversation(Random(number), FINISHING).messages
        found = json.loads(reply["content"])
        if isinstance(found, dict) and found:
            told = [str(one) for pair in found.items() for one in pair]
            copied += all(one in asked["content"] for one in told)
    assert copied > 15


def test_after_each_field_a_record_is_likelier_to_end_than_to_go_on() -> None:
    lengths = []
    for number in range(300):
        *_, asked, reply = object_conversation(Random(number), FINISHING).messages
        found = json.loads(reply["content"])
        assert reply["content"] == json.dumps(found)  # as the grammar of a schema spaces it
        if isinstance(found, dict) and not all(str(key) in asked["content"] for key in found):
            lengths.append(len(found))
    assert lengths.count(1) > 0.5 * len(lengths) > 0
    assert max(lengths) > 2


def test_a_picture_is_asked_for_beside_other_tools() -> None:
    drawn = set()
    for number in range(80):
        conversation = calling_conversation(Random(number), FINISHING)
        for message in conversation.messages:
            calls = [call["function"]["name"] for call in message.get("tool_calls", ())]
            if "draw" in calls:
                drawn.add(len(conversation.tools))
    assert drawn >= {2, 3}


@pytest.fixture(scope="module")
def model() -> Model:
    torch.set_num_threads(1)
    return load(Adaptation(), Path("models/pocket-chat"))


@pytest.mark.parametrize("name", ["words", "talk", "settle", "tools", "recall", "whole"])
def test_each_step_has_its_share_of_every_kind_of_lesson(model: Model, name: str) -> None:
    recipe = Adaptation()
    stage, lessons = recipe.stages[name], recipe.lessons[name]
    placeholder = model.llava.config.image_token_index
    stream = LessonStream(recipe, stage, model.tokenizer, placeholder, lessons)
    rows = [stream.row(index) for index in range(stage.batch)]
    pictured = sum(lessons.get(kind, 0) for kind in ("styled", "scattered", "own"))
    assert [bool(row.pictures) for row in rows] == [n < pictured for n in range(stage.batch)]
    reply = rows[pictured + sum(lessons.get(kind, 0) for kind in ("spelled", "choices", "calls"))]
    opening = len(model.tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False))
    first = reply.weights.index(1.0)
    assert reply.weights[first - 1] == 0.0
    assert model.tokenizer.decode(reply.ids[first - 1 - opening : first - 1]).endswith(
        "assistant\n"
    )


@pytest.mark.long
def test_the_tower_learns_from_the_frozen_one(model: Model) -> None:
    recipe = Adaptation(reference_pictures=100)
    stage = Stage(steps=6, batch=12, matrix_lr=4e-3, other_lr=6e-4, warmup=1)
    trainer = TowerAdapter(recipe, model, stage, teacher=model)
    before = {name: one.clone() for name, one in trainer.teacher.model.named_parameters()}
    same = lesson_batch(recipe, stage, 0)
    reports = [trainer.train_step(same) for _ in range(stage.steps)]
    assert reports[-1].things > reports[0].things + 0.1
    after = dict(trainer.teacher.model.named_parameters())
    assert all(torch.equal(after[name], one) for name, one in before.items())


def test_weights_are_averaged_with_those_of_other_checkpoints(tmp_path: Path) -> None:
    recipe, folder = Adaptation(), Path("models/pocket-chat")
    other = load(recipe, folder)
    before = {name: one.clone() for name, one in other.llava.state_dict().items()}
    with torch.no_grad():
        for parameter in other.llava.parameters():
            parameter.add_(0.25)
    average(recipe, other, [folder])
    for name, one in other.llava.named_parameters():
        assert torch.allclose(one, before[name] + 0.125, atol=1e-6)


def test_a_slant_gives_more_crowded_and_smaller_pictures() -> None:
    slant = Slant(many=1.0, small=1.0)
    crowded = [len(sample_pictured_scene(Random(n), many_share=1.0).things) for n in range(60)]
    assert set(crowded) == {4, 5, 6}
    sides = [sample_style(Random(number), small_share=1.0) for number in range(60)]
    assert all(16 <= min(one.width, one.height) <= max(one.width, one.height) < 56 for one in sides)
    assert min(min(one.width, one.height) for one in sides) < 20
    assert sample_style(Random(3), small_share=0.0) == sample_style(Random(3))
    one = lesson(41, 3, slant=slant)
    assert one.picture.shape == one.plain.shape == (64, 64, 3)


def test_a_records_keys_are_no_targets_and_its_commas_light_ones() -> None:
    reply = '{"a, b": "c, d", "e": [1, 2], "f": {"g": "h\\": i"}}'
    assert json.loads(reply)["f"]["g"] == 'h": i'
    found = shares(reply)
    light = [place for place, one in enumerate(found) if one == COMMA_WEIGHT]
    assert [reply[place - 1] for place in light] == ['"', "1", "]"]
    keys = "".join(letter for letter, one in zip(reply, found, strict=True) if one == 0.0)
    assert keys == "a, befg"


def test_records_are_json_of_every_kind_and_short() -> None:
    kinds, lengths = set(), []
    for number in range(300):
        conversation = record_conversation(Random(number), FINISHING)
        assert conversation.messages[-1]["role"] == "assistant"
        reply = conversation.messages[-1]["content"]
        found = json.loads(reply)
        assert len(shares(reply)) == len(reply)
        kinds |= {type(each) for each in found.values()}
        lengths.append(len(found))
    assert kinds == {str, int, float, bool, type(None), list, dict}
    assert max(lengths) <= 5


def test_words_that_calls_copy_are_spelled_anew_everywhere(model: Model) -> None:
    known = pieces(model.tokenizer)
    assert len(known) > 300
    changed = 0
    for number in range(60):
        before = choosing_conversation(Random(number), FINISHING)
        found = respelled(before, Random(number), known)
        asked = " ".join(one["content"] for one in found.messages if one["role"] == "user")
        fields = {
            one["function"]["name"]: one["function"]["parameters"]["properties"]
            for one in found.tools
        }
        for message in found.messages:
            for call in message.get("tool_calls", ()):
                function = call["function"]
                assert set(function["arguments"]) == set(fields[function["name"]])
                if function["name"] != "draw":
                    assert all(str(each) in asked for each in function["arguments"].values())
        changed += found.messages != before.messages
    assert changed > 50


def test_eyes_and_words_are_trained_in_one_step(model: Model, tmp_path: Path) -> None:
    recipe = Adaptation(reference_pictures=150, whole_pictures=4)
    stage = Stage(steps=3, batch=3, matrix_lr=4e-3, other_lr=6e-4, warmup=1)
    own = load(recipe, Path("models/pocket-chat"))
    stream = LessonStream(
        recipe, stage, own.tokenizer, own.llava.config.image_token_index, {"own": 1, "record": 1}
    )
    trainer = WholeTrainer(recipe, own, stage, teacher=model, stream=stream)
    before = {name: one.clone() for name, one in own.llava.named_parameters()}
    reports = trainer.run(tmp_path / "state.pt")
    assert len(reports) == stage.steps
    after = dict(own.llava.named_parameters())
    same = [name for name, one in after.items() if torch.equal(before[name], one)]
    assert len(same) < 0.1 * len(after)  # such as biases of keys, which no loss depends on
    saved = trainer.saved()
    assert set(saved) == {"kept", "mean"}
    assert set(saved["mean"]) == set(saved["kept"]) == set(own.llava.state_dict())
    last = {name: one.clone() for name, one in own.llava.state_dict().items()}
    save(recipe, own, saved["kept"], tmp_path / "kept")
    assert all(torch.equal(last[name], one) for name, one in own.llava.state_dict().items())
    again = load(recipe, tmp_path / "kept").llava.state_dict()
    assert all(torch.allclose(again[name], one, atol=2e-3) for name, one in saved["kept"].items())


def test_pictures_are_the_same_packed(model: Model) -> None:
    shown = pixels([lesson(41, number).picture for number in range(2)])
    assert packed(shown).dtype == torch.uint8
    assert torch.allclose(unpacked(packed(shown)), shown, atol=1e-6)
    ids = torch.tensor([[3, *[model.llava.config.image_token_index] * 16, 5]] * 2)
    with torch.no_grad():
        told = model.reply(shown, input_ids=ids, use_cache=False).logits
        wanted = model.llava(input_ids=ids, pixel_values=shown, use_cache=False).logits
    assert torch.allclose(told, wanted, atol=1e-5)
