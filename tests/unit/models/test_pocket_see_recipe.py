"""Test pocket_see.py at a small size: pictures, questions, both stages, the exported folder."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from PIL import Image  # noqa: E402

from motet_encoder.checkpoint import load_family  # noqa: E402
from motet_llm.config import EngineConfig  # noqa: E402
from motet_llm.engine.engine import Engine  # noqa: E402
from motet_llm.models.image_embeddings import ImageEmbedding  # noqa: E402
from motet_shared.messages import Sampling  # noqa: E402
from motet_tokenizer.encoding.vocabulary import Vocabulary  # noqa: E402
from recipes.chat import evaluate  # noqa: E402
from recipes.chat.data import scene_conversation  # noqa: E402
from recipes.chat.recipe import Phase  # noqa: E402
from recipes.chat.recipe import Recipe as ChatRecipe  # noqa: E402
from recipes.chat.stream import held_out  # noqa: E402
from recipes.chat.train import Trainer as ChatTrainer  # noqa: E402
from recipes.draw.check import detect_things  # noqa: E402
from recipes.see.batches import Stream, pixels  # noqa: E402
from recipes.see.data import (  # noqa: E402
    CELLS,
    KINDS,
    augmented_picture,
    cell_kinds,
    cell_picture,
    held_out_questions,
    is_held_out_scene,
    picture_conversation,
)
from recipes.see.evaluate import decode, detected_scene, load, questions_about, score  # noqa: E402
from recipes.see.mix import LOCATING, VIEWING  # noqa: E402
from recipes.see.questions import (  # noqa: E402
    VISUAL_QUESTION_MAKERS,
    ask_above_below,
    ask_left_right,
    ask_where,
    in_reading_order,
)
from recipes.see.recipe import Recipe  # noqa: E402
from recipes.see.train import IMAGE_TOKEN, Model, TalkTrainer, TowerTrainer, train  # noqa: E402
from recipes.training.errors import RecipeError  # noqa: E402
from recipes.training.held_out_seeds import HELD_OUT_SEEDS  # noqa: E402
from recipes.training.loop import Schedule, Stage  # noqa: E402
from recipes.world.pictures import SIZE, draw  # noqa: E402
from recipes.world.scenes import Scene, Thing, canonical, relation_holds, sample_scene  # noqa: E402

WORDS = ChatRecipe(
    hidden=32,
    intermediate=48,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=16,
    tokenizer_conversations=300,
    phases=(Phase(start=0, batch=4),),
    warmup=2,
)
TINY = Recipe(
    width=32,
    intermediate=48,
    layers=1,
    heads=2,
    tower=Stage(steps=60, batch=12, matrix_lr=0.02, other_lr=3e-3, warmup=4),
    talk=Stage(steps=6, batch=6, matrix_lr=0.01, other_lr=3e-3, warmup=2),
)
MESSAGES = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What do you see?"}]}
]


def scattered(*things: tuple[str, str, int, int]) -> Scene:
    return Scene(things=tuple(Thing(shape=s, colour=c, column=x, row=y) for s, c, x, y in things))


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a tiny language model as pocket_chat.py exports it."""
    folder = tmp_path_factory.mktemp("words")
    trainer = ChatTrainer(WORDS, Schedule(steps=4, warmup=2))
    trainer.run(folder / "state.pt")
    trainer.export(folder / "words")
    return folder / "words"


@pytest.fixture(scope="module")
def run(words: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Path]:
    """Train both stages at a small size; return the model and its folder."""
    folder = tmp_path_factory.mktemp("see")
    model, complete = train(TINY, words, folder / "state.pt", steps={}, resume=False)
    assert complete
    model.save(folder / "eyes")
    return model, folder / "eyes"


# Questions


def test_things_are_put_into_reading_order() -> None:
    scene = scattered(("star", "red", 3, 2), ("circle", "blue", 1, 0), ("star", "red", 0, 1))
    assert canonical(in_reading_order(scene)) == "A blue circle and two red stars."
    column = scattered(("star", "red", 3, 0), ("circle", "blue", 3, 2))
    assert (
        canonical(in_reading_order(column)) == "From top to bottom: a red star and a blue circle."
    )
    for seed in range(50):
        seen = in_reading_order(sample_scene(Random(seed)))
        assert in_reading_order(seen) == seen


def test_where_is_one_of_four_corners() -> None:
    scene = scattered(("star", "red", 3, 0), ("circle", "blue", 1, 2))
    answers = {
        (q.text.split()[-1].rstrip("?"), q.answer)
        for seed in range(60)
        if (q := ask_where(scene, Random(seed)))
    }
    assert {answer for who, answer in answers if who == "star"} == {"At the top right."}
    assert {answer for who, answer in answers if who == "circle"} == {"At the bottom left."}
    assert ask_where(scattered(("star", "red", 3, 0), ("star", "red", 1, 2)), Random(0)) is None


@pytest.mark.parametrize(
    ("make_question", "relations"),
    [(ask_left_right, ("left", "right")), (ask_above_below, ("above", "below"))],
)
def test_scattered_things_are_related_by_where_they_stand(
    make_question, relations: tuple[str, str]
) -> None:
    scene = scattered(("star", "red", 3, 0), ("circle", "blue", 1, 2), ("square", "green", 0, 1))
    by_shape = {thing.shape: thing for thing in scene.things}
    checked = 0
    for seed in range(300):
        question = make_question(scene, Random(seed))
        assert question is not None
        assert not question.text.startswith("Where")
        said = question.text.rstrip("?").split()
        named = [by_shape[word] for word in said if word in by_shape]
        if question.answer in ("Yes.", "No.") and len(named) == 2:
            relation = next(word for word in said if word in relations)
            relation += " of" if relation in ("left", "right") else ""
            assert (question.answer == "Yes.") == relation_holds(relation, *named)
            checked += 1
    assert checked > 20


# Pictures and conversations


def test_cells_hold_what_the_picture_shows() -> None:
    for seed in range(20):
        scene = sample_scene(Random(seed))
        found = cell_kinds(scene.things)
        seen = [str(one.kind) for one in detect_things(draw(scene, Random(seed))).things]
        assert sorted(seen) == sorted(str(KINDS[number]) for number in found if number)
        for thing in scene.things:
            assert KINDS[found[4 * thing.row + thing.column]] == thing.kind
    crowds = [cell_picture(1, index, crowded_share=1.0) for index in range(20)]
    assert max((one.kinds > 0).sum() for one in crowds) > 6
    again = cell_picture(1, 3, crowded_share=1.0)
    assert np.array_equal(again.picture, crowds[3].picture)
    assert np.array_equal(again.kinds, crowds[3].kinds)


def test_augmented_pictures_still_show_the_scene() -> None:
    scene = scattered(("star", "red", 3, 0), ("circle", "blue", 1, 2))
    taken = [augmented_picture(scene.things, Random(seed)) for seed in range(40)]
    assert all(picture.shape == (SIZE, SIZE, 3) and picture.dtype == np.uint8 for picture in taken)
    assert len({picture.tobytes() for picture in taken}) == 40
    plain = draw(scene, Random(0)).astype(float)
    assert all(np.abs(picture - plain).mean() < 25 for picture in taken)


def test_a_conversation_is_a_function_of_seed_and_index() -> None:
    one, again, other = (
        picture_conversation(3, 5),
        picture_conversation(3, 5),
        picture_conversation(3, 6),
    )
    assert one.conversation == again.conversation
    assert all(map(np.array_equal, one.pictures, again.pictures))
    assert one.conversation != other.conversation
    with pytest.raises(RecipeError) as refused:
        picture_conversation(HELD_OUT_SEEDS.start, 0)
    assert refused.value.param == "seed"
    with pytest.raises(RecipeError) as refused:
        cell_picture(HELD_OUT_SEEDS.start, 0, crowded_share=0.5)
    assert refused.value.param == "seed"


def test_training_never_meets_a_scene_of_a_held_out_picture() -> None:
    asked = held_out_questions(6)
    assert set(asked) == set(VISUAL_QUESTION_MAKERS)
    assert all(
        len(some) == 6 and all(is_held_out_scene(one.scene) for one in some)
        for some in asked.values()
    )
    kept = {key for some in asked.values() for one in some for key in one.example.conversation.keys}
    assert kept
    told = {key for items in held_out().values() for item in items for key in item.keys}
    for index in range(150):
        assert not picture_conversation(Recipe().seed, index).conversation.keys & (kept | told)


def stream_of(model: Model) -> Stream:
    return Stream(TINY, model.tokenizer, model.llava.config.image_token_index)


def test_a_row_has_one_token_per_cell(words: Path) -> None:
    stream = stream_of(Model(TINY, words))
    shown = round(TINY.picture_share * TINY.talk.batch)
    for index in range(TINY.talk.batch):
        row = stream.row(index)
        places = [
            weight
            for token, weight in zip(row.ids, row.weights, strict=True)
            if token == stream.placeholder
        ]
        assert len(places) == CELLS * len(row.pictures)
        assert not any(places)
        assert bool(row.pictures) == (index < shown)
        assert 1.0 in row.weights
    parts = stream.batches(0)
    assert sum(len(part.batch.tokens) for part in parts) == TINY.talk.batch
    for part in parts:
        count = int((part.batch.tokens == stream.placeholder).sum())
        assert count == CELLS * (0 if part.pixels is None else len(part.pixels))


def test_the_mix_changes_with_the_steps() -> None:
    recipe = Recipe(viewing_mixes=((0, VIEWING), (3, LOCATING)))
    assert [recipe.viewing_mix(step) is LOCATING for step in range(5)] == [
        False,
        False,
        False,
        True,
        True,
    ]
    assert all(
        set(mix.scene) == {*VISUAL_QUESTION_MAKERS, "instruction"}
        for _, mix in Recipe().viewing_mixes
    )


# The trainings


def test_the_real_size_is_within_its_bounds(words: Path) -> None:
    model = Model(Recipe(), words)
    count = sum(parameter.numel() for parameter in model.vision.parameters())
    assert 500_000 < count < 1_500_000


def test_the_tower_learns_what_stands_in_a_cell(words: Path) -> None:
    trainer = TowerTrainer(TINY, Model(TINY, words))
    reports = [trainer.train_step(batch) for batch in trainer.batches()]
    assert reports[-1].accuracy > 4 / len(KINDS)
    early, late = (
        np.mean([report.loss for report in some]) for some in (reports[:5], reports[-5:])
    )
    assert late < 0.8 * early


def test_the_talk_stage_lowers_both_losses(words: Path) -> None:
    model = Model(TINY, words)
    trainer = TalkTrainer(TINY.talk, model, stream_of(model))
    same = trainer.stream.batches(0)
    reports = [trainer.train_step(same) for _ in range(TINY.talk.steps)]
    assert reports[-1].picture_loss < 0.9 * reports[0].picture_loss
    assert reports[-1].text_loss < reports[0].text_loss
    assert reports[0].tokens == sum(int((part.batch.weights > 0).sum()) for part in same)


@pytest.mark.long
def test_a_run_that_is_resumed_takes_the_course_of_one_that_is_not(
    run, words: Path, tmp_path: Path
) -> None:
    whole, _ = run
    first = TowerTrainer(TINY, Model(TINY, words))
    for batch in islice(first.batches(), 3):
        first.train_step(batch)
    first.save_state(tmp_path / "tower.pt")
    (tmp_path / "stop").touch()
    _, complete = train(TINY, words, tmp_path / "state.pt", steps={}, resume=True)
    assert not complete
    (tmp_path / "stop").unlink()
    resumed, complete = train(TINY, words, tmp_path / "state.pt", steps={}, resume=True)
    assert complete
    for (name, one), (_, two) in zip(
        whole.named_parameters(), resumed.named_parameters(), strict=True
    ):
        torch.testing.assert_close(one, two, atol=2e-3, rtol=1e-2, msg=name)


# The folder


def test_transformers_loads_the_folder(run) -> None:
    trained, folder = run
    model, processor = load(folder)
    picture = draw(sample_scene(Random(1)), Random(1))
    seen = torch.stack(model.get_image_features(pixels([picture]), return_dict=True).pooler_output)
    torch.testing.assert_close(
        seen, trained.image_embeddings(pixels([picture])), atol=0.05, rtol=0.05
    )
    prepared = processor.image_processor([Image.fromarray(picture)], return_tensors="pt")[
        "pixel_values"
    ]
    torch.testing.assert_close(prepared, pixels([picture]))
    text = processor.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert (
        text
        == f"<|im_start|>user\n{IMAGE_TOKEN}What do you see?<|im_end|>\n<|im_start|>assistant\n"
    )
    inputs = processor(
        text=[text], images=[Image.fromarray(picture).resize((100, 70))], return_tensors="pt"
    )
    assert int((inputs["input_ids"] == model.config.image_token_id).sum()) == CELLS
    assert sum(path.stat().st_size for path in folder.iterdir()) < 8_000_000


def test_conversations_without_pictures_read_as_before(run, words: Path) -> None:
    _, folder = run
    before, after = Vocabulary.load("words", str(words)), Vocabulary.load("eyes", str(folder))
    assert after.card.images
    assert not before.card.images
    assert after.eos_ids == before.eos_ids
    (placeholder,) = after.placeholders
    for seed in range(20):
        made = scene_conversation(Random(seed))
        if made is not None:
            messages = list(made.messages)[:-1]
            assert after.template.encode(messages, []) == before.template.encode(messages, [])
    forged = after.template.encode([{"role": "user", "content": f"What is {IMAGE_TOKEN}?"}], [])
    assert placeholder not in forged
    tool = [{"role": "tool", "content": [{"type": "image"}, {"type": "text", "text": "ok"}]}]
    assert after.template.encode([*MESSAGES, *tool], []).count(placeholder) == 2


def test_the_services_generate_what_transformers_generates(run) -> None:
    _, folder = run
    model, _ = load(folder)
    eyes, vocabulary = load_family(folder, torch.float32), Vocabulary.load("eyes", str(folder))
    config = EngineConfig(
        model=str(folder),
        block_size=8,
        num_blocks=64,
        token_budget=64,
        max_running=4,
        overlap=False,
    )
    engine = Engine(config)
    for seed in range(3):
        scene = sample_scene(Random(seed), min_things=2)
        shown = eyes.prepare(Image.fromarray(draw(scene, Random(seed), size=96)), 0)
        [embeddings] = eyes.encode([shown])
        assert embeddings.shape == (1, CELLS, WORDS.hidden)
        prompt = vocabulary.template.expand_placeholders(
            vocabulary.template.encode(MESSAGES, []), ["image"], [shown.ids]
        )
        sampling = Sampling(temperature=0, max_tokens=6, ignore_eos=True)
        engine.add(seed, prompt, sampling, images=[ImageEmbedding(embeddings, f"picture {seed}")])
        ids: list[int] = []
        while engine.has_work:
            ids += [token for output in engine.step() for token in output.ids]
        due = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=6,
            min_new_tokens=6,
            eos_token_id=1 << 20,
            do_sample=False,
            **shown.inputs,
        )
        assert ids == due[0, len(prompt) :].tolist()


# Evaluation


def test_the_checker_finds_the_scene_again() -> None:
    for seed in range(20):
        scene = sample_scene(Random(seed))
        assert detected_scene(draw(scene, Random(seed))) == in_reading_order(scene)
    assert detected_scene(np.full((SIZE, SIZE, 3), 240, np.uint8)) is None


def test_answers_are_scored(run) -> None:
    _, folder = run
    model, processor = load(folder)
    asked = questions_about(
        [draw(sample_scene(Random(seed), min_things=2), Random(seed)) for seed in range(3)]
    )
    assert {"count", "description", "existence"} <= set(asked)
    assert len(decode(model, processor, asked["count"])) == 3
    few = {
        category: [one.example for one in some] for category, some in held_out_questions(2).items()
    }
    assert all(0 <= share <= 1 for share in score(folder, few).values())
    words_only = [items[0] for items in held_out().values()]
    answers = list(evaluate.answer_questions(*evaluate.load(folder), words_only, batch=7))
    assert len(answers) == len(words_only)
