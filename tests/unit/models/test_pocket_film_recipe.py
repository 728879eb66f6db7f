"""Test the pocket-film recipe at a small size, its checker, and the model that ships."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from motet_diffusion.engine.request import PictureRequest  # noqa: E402
from motet_diffusion.pipeline.rules import folder_defaults  # noqa: E402
from recipes.film.autoencoder import decode, encode  # noqa: E402
from recipes.film.batches import cell_labels  # noqa: E402
from recipes.film.check import check  # noqa: E402
from recipes.film.data import example, held_out, is_held_out, prompted  # noqa: E402
from recipes.film.drawing import Film, draw  # noqa: E402
from recipes.film.evaluate import generate, load  # noqa: E402
from recipes.film.model import Model, tensor  # noqa: E402
from recipes.film.recipe import Recipe, Stage  # noqa: E402
from recipes.film.scenes import (  # noqa: E402
    DIRECTIONS,
    FRAME_RATE,
    FRAMES,
    MOTIONS,
    Actor,
    Course,
    place,
)
from recipes.film.train import train, trainer_of  # noqa: E402
from recipes.training.errors import RecipeError  # noqa: E402
from recipes.training.held_out_seeds import HELD_OUT_SEEDS  # noqa: E402
from recipes.world.pictures import SIZE  # noqa: E402
from support.engine.recording_engine import RecordingEngine, assert_alike  # noqa: E402

TINY = Recipe(
    tokenizer_prompts=60,
    text_width=32,
    text_layers=1,
    encoder_channels=8,
    decoder_channels=8,
    latents=4,
    heads=2,
    head_dim=16,
    layers=1,
    ffn_width=32,
    pool=3,
    picture=Stage(steps=3, batch=2, matrix_lr=None, other_lr=3e-3, warmup=2),
    vae=Stage(steps=3, batch=1, matrix_lr=None, other_lr=3e-3, warmup=2),
    reader=Stage(steps=3, batch=4, matrix_lr=0.01, other_lr=2e-3, warmup=2),
    painter=Stage(steps=4, batch=2, matrix_lr=0.01, other_lr=2e-3, warmup=2),
    decoder=Stage(steps=2, batch=1, matrix_lr=None, other_lr=3e-3, warmup=2),
)
RED, BLUE = Actor("circle", "red", "right"), Actor("square", "blue", "still")


def film_of(*actors: Actor) -> Film:
    courses = place(actors, Random(3))
    assert courses is not None
    return draw(actors, courses, Random(3))


def test_the_checker_finds_what_films_show() -> None:
    wrong = [
        found.reason
        for one in (example(3, index) for index in range(20))
        if not (found := check(one.film, one.actors)).correct
    ]
    assert not wrong


def test_the_checker_tells_wrong_films() -> None:
    film = film_of(RED, BLUE)
    assert check(film, [BLUE, RED]).correct
    for motion in set(MOTIONS) - {"right"}:
        assert not check(film, [RED._replace(motion=motion), BLUE]).correct
    for other in (RED._replace(shape="triangle"), RED._replace(colour="purple")):
        assert not check(film, [other, BLUE]).correct
    assert not check(film, [BLUE._replace(motion="right"), RED._replace(motion="still")]).correct
    assert "2 things, not 1" in check(film, [RED]).reason
    assert not check(film, [RED, BLUE, Actor("triangle", "green", "up")]).correct
    assert not check(film[::-1], [RED, BLUE]).correct
    gone = film.copy()
    gone[6] = gone[0, 0, 0]
    assert "0 things in a frame" in check(gone, [RED, BLUE]).reason
    jumping = film.copy()
    jumping[1:-1] = film[0]
    assert not check(jumping, [RED, BLUE]).correct
    speckled = film.copy()
    speckled[4, 1::8, 1::8] = 0
    assert "belong to no thing" in check(speckled, [RED, BLUE]).reason
    with pytest.raises(RecipeError) as refused:
        check(film[0], [RED])
    assert refused.value.param == "film"


def test_the_checker_knows_other_peoples_films() -> None:
    """A film of another size, ground and palette, that no recipe draws."""
    rows, columns = np.mgrid[:96, :96] + 0.5
    film = np.full((9, 96, 96, 3), (200, 215, 230), np.uint8)
    for number, frame in enumerate(film):
        frame[np.hypot(columns - 20 - 6 * number, rows - 30) < 12] = (180, 0, 20)
        frame[60:82, 40:62] = (70, 110, 255)
    assert check(film, [RED, BLUE]) == (True, "")
    assert not check(film, [RED, BLUE._replace(motion="up")]).correct


def test_training_meets_no_held_out_prompt() -> None:
    with pytest.raises(RecipeError) as refused:
        example(HELD_OUT_SEEDS.start, 0)
    assert refused.value.param == "seed"
    assert not any(is_held_out(prompted(31, index)[1]) for index in range(300))
    asked = list(held_out(40))
    assert all(is_held_out(actors) for _, actors in asked)
    assert {len(actors) for _, actors in asked} == {1, 2, 3}
    assert [text for text, _ in islice(held_out(40), 5)] == [text for text, _ in asked[:5]]
    one, again = example(3, 5), example(3, 5)
    assert (one.prompt, one.actors) == (again.prompt, again.actors)
    assert np.array_equal(one.film, again.film)


def test_cell_labels_follow_the_things() -> None:
    course = Course((8, 8), (56, 8), 6, 1)
    [shapes, colours, motions] = cell_labels(example(3, 0)._replace(actors=[RED], courses=[course]))
    cells = [number for number, label in enumerate(shapes) if label != 3]
    assert cells == [0, 16 + 1, 32 + 1, 48 + 2, 64 + 3]
    assert {shapes[cell] for cell in cells} == {0}
    assert {motions[cell] for cell in cells} == {list(DIRECTIONS).index("right")}
    assert colours[1] == 6


def test_a_whole_film_is_encoded_as_diffusers_encodes_its_parts() -> None:
    vae = Model(TINY).vae
    films = tensor(torch.from_numpy(np.stack([example(3, index).film for index in range(2)])))
    with torch.no_grad():
        latents = vae.encode(films).latent_dist.mean
        torch.testing.assert_close(encode(vae, films)[0], latents, atol=1e-5, rtol=1e-5)
        whole = decode(vae, latents).clamp(-1, 1)
        torch.testing.assert_close(whole, vae.decode(latents).sample, atol=1e-5, rtol=1e-5)
        first = encode(vae, films[:, :, :1])[0]
    torch.testing.assert_close(first, latents[:, :, :1], atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")  # of a norm's weight in float32
def test_all_stages_a_restart_and_a_folder_that_is_served(tmp_path: Path) -> None:
    state = tmp_path / "state" / "state.pt"
    whole = train(TINY, state, steps={}, resume=False)
    stopped = trainer_of(TINY, Model(TINY), "picture")
    losses = [stopped.train_step(films) for films in islice(stopped.batches(), 2)]
    assert len(set(losses)) == 2
    again = tmp_path / "again" / "state.pt"
    stopped.save_state(again.parent / "picture.pt")
    resumed = train(TINY, again, steps={}, resume=True)
    for (name, one), (_, two) in zip(
        whole.named_parameters(), resumed.named_parameters(), strict=True
    ):
        torch.testing.assert_close(one, two, atol=2e-2, rtol=2e-2, msg=name)
    for parameter in whole.painter.parameters():
        torch.nn.init.normal_(parameter, std=0.1)  # a fresh one adds nothing to the noise
    whole.save(folder := tmp_path / "folder")
    begun = Model(TINY)
    begun.load(folder)
    assert begun.vae.config.latents_std == whole.vae.config.latents_std
    for part in ("vae", "reader.text", "painter.denoiser"):
        for name, one in begun.get_submodule(part).state_dict().items():
            saved = whole.get_submodule(part).state_dict()[name]
            torch.testing.assert_close(one, saved, atol=1e-3, rtol=1e-3, msg=name)
    defaults = folder_defaults(folder)
    assert (defaults["num_frames"], defaults["frame_rate"]) == (FRAMES, FRAME_RATE)
    [due] = generate(load(folder), ["a red circle falls"], steps=3, seed=3)
    assert due.shape == (FRAMES, SIZE, SIZE, 3)
    asked = PictureRequest(prompt="a red circle falls", steps=3, seed=3)
    with RecordingEngine(folder, threads=1) as recording:
        [made] = recording.draw(asked)
    assert_alike(made, due.astype(np.int64))


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_stages_by_themselves_bound_by_time(tmp_path: Path) -> None:
    """Stages of one another's state: as several processes train them on one GPU."""
    state = tmp_path / "state.pt"
    first = ("picture", "vae", "reader")
    train(TINY, state, steps={}, resume=False, stages=first, seconds=dict.fromkeys(first, 0.5))
    assert {path.stem for path in tmp_path.glob("*.pt")} == set(first)
    decoder = train(TINY, state, steps={}, resume=True, stages=["decoder"], workers=1)
    whole = train(TINY, state, steps={}, resume=True, stages=["painter"], seconds={"painter": 1.0})
    states = {path.stem: torch.load(path) for path in tmp_path.glob("*.pt")}
    assert states["decoder"]["step"] == TINY.decoder.steps
    assert states["painter"]["step"] >= 1
    for name, one in decoder.vae.decoder.state_dict().items():
        assert torch.equal(one, whole.vae.decoder.state_dict()[name]), name
