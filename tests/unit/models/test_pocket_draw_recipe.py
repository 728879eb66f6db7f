"""Test the pocket-draw recipe at a small size: examples, stages, the folder, its score."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from motet_diffusion.engine.request import PictureRequest  # noqa: E402
from motet_diffusion.pipeline.rules import folder_defaults  # noqa: E402
from recipes.draw.check import check  # noqa: E402
from recipes.draw.data import batch, example, held_out, is_held_out  # noqa: E402
from recipes.draw.evaluate import GUIDANCE, generate, load, score  # noqa: E402
from recipes.draw.recipe import Recipe, Stage  # noqa: E402
from recipes.draw.train import (  # noqa: E402
    Model,
    Trainer,
    build_scheduler,
    cell_labels,
    scene_labels,
    tensor,
    train,
)
from recipes.training.errors import RecipeError  # noqa: E402
from recipes.training.held_out_seeds import HELD_OUT_SEEDS  # noqa: E402
from recipes.world.pictures import SIZE  # noqa: E402
from recipes.world.scenes import Scene, Thing  # noqa: E402
from support.engine.recording_engine import RecordingEngine, assert_alike  # noqa: E402

TINY = Recipe(
    tokenizer_prompts=60,
    text_width=32,
    text_layers=1,
    channels=(8, 8, 8),
    heads=2,
    head_dim=16,
    layers=1,
    vae=Stage(steps=8, batch=2, matrix_lr=None, other_lr=3e-3, warmup=2),
    decoder=Stage(steps=2, batch=2, matrix_lr=None, other_lr=3e-3, warmup=2),
    reader=Stage(steps=3, batch=4, matrix_lr=0.01, other_lr=2e-3, warmup=2),
    painter=Stage(steps=6, batch=2, matrix_lr=0.01, other_lr=2e-3, warmup=2),
)


def test_examples_are_functions_of_seed_and_index() -> None:
    one, again, other = example(3, 5), example(3, 5), example(3, 6)
    assert (one.prompt, one.scene) == (again.prompt, again.scene)
    assert np.array_equal(one.picture, again.picture)
    assert one.prompt != other.prompt
    assert [made.prompt for made in batch(3, 1, 2)] == [example(3, 2).prompt, example(3, 3).prompt]
    assert check(one.picture, one.scene).correct


def test_training_meets_no_held_out_scene() -> None:
    with pytest.raises(RecipeError) as refused:
        example(HELD_OUT_SEEDS.start, 0)
    assert refused.value.param == "seed"
    assert not any(is_held_out(example(30, index).scene) for index in range(40))
    asked = list(held_out(40))
    assert len(asked) == 40
    assert all(is_held_out(scene) and 2 <= len(scene.things) <= 3 for _, scene in asked)
    assert [prompt for prompt, _ in islice(held_out(40), 5)] == [prompt for prompt, _ in asked[:5]]


def test_the_real_size_is_within_its_bounds() -> None:
    model = Model(replace(Recipe(), tokenizer_prompts=200))
    assert 4_000_000 < sum(parameter.numel() for parameter in model.parameters()) <= 15_000_000
    longest = max(len(model.tokenizer(example(30, index).prompt).input_ids) for index in range(100))
    assert longest <= Recipe.prompt_tokens
    for text in ("two red circles and a blue square", "From top to bottom: a large purple star."):
        ids = model.tokenizer(text).input_ids
        assert model.tokenizer.decode(ids, skip_special_tokens=True) == text
        assert model.tokenizer.unk_token_id not in ids


def test_all_stages_a_restart_and_a_folder_that_diffusers_loads(tmp_path: Path) -> None:
    state = tmp_path / "state" / "state.pt"
    whole = train(TINY, state, steps={}, resume=False)
    stopped = tmp_path / "again" / "state.pt"
    model = Model(TINY)
    first = Trainer(TINY, model, "vae", steps=TINY.vae.steps)
    losses = [first.train_step(step) for step in islice(first.batches(), 3)]
    first.save_state(stopped.parent / "vae.pt")
    assert len(set(losses)) == 3
    resumed = train(TINY, stopped, steps={}, resume=True)
    for (name, one), (_, two) in zip(
        whole.named_parameters(), resumed.named_parameters(), strict=True
    ):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-3, msg=name)
    assert whole.vae.config.scaling_factor == pytest.approx(
        resumed.vae.config.scaling_factor, rel=1e-3
    )
    whole.save(tmp_path / "folder")
    index = json.loads((tmp_path / "folder" / "model_index.json").read_text())
    assert index["_class_name"] == "PixArtSigmaPipeline"
    best = folder_defaults(tmp_path / "folder")
    assert (best["guidance_scale"], best["num_inference_steps"]) == (
        TINY.guidance,
        TINY.denoising_steps,
    )
    pipeline = load(tmp_path / "folder")
    assert pipeline.vae.config.scaling_factor == whole.vae.config.scaling_factor
    alone, both = (
        generate(pipeline, prompts, steps=2)
        for prompts in (["a red star"], ["a red star", "two circles"])
    )
    assert alone[0].shape == (SIZE, SIZE, 3)
    assert np.abs(alone[0].astype(int) - both[0].astype(int)).max() <= 1, (
        "its seed's picture, alone or in company"
    )
    assert not np.array_equal(both[0], both[1])
    found = score(tmp_path / "folder", 4, 2)
    assert 0 <= found["right"] <= 1


def test_the_autoencoder_learns() -> None:
    model = Model(TINY)
    trainer = Trainer(TINY, model, "vae", steps=60)
    same = batch(30, 0, 2)
    losses = [trainer.train_step(same) for _ in range(12)]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


def test_scene_labels_sort_scattered_things() -> None:
    circle, star = (
        Thing(shape="circle", colour="red"),
        Thing(shape="star", colour="blue", size="small", column=2),
    )
    row = Scene(things=(star, replace(circle, column=3)))
    assert scene_labels(row) == [[3, 0, 4], [2, 0, 7], [0, 2, 3], [0, 0, 3]]
    scattered = (
        Scene(things=(replace(star, row=1), circle)),
        Scene(things=(circle, replace(star, row=1))),
    )
    assert (
        scene_labels(scattered[0])
        == scene_labels(scattered[1])
        == [[0, 3, 4], [0, 2, 7], [2, 0, 3], [2, 2, 3]]
    )


def test_cell_labels_follow_the_grid() -> None:
    scene = Scene(things=(Thing(shape="star", colour="blue", size="small", row=1, column=2),))
    for labels, nothing, star in zip(cell_labels(scene), (4, 7, 3), (3, 2, 0), strict=True):
        assert labels == [nothing] * 6 + [star] + [nothing] * 9


def test_the_prompt_encoder_learns() -> None:
    trainer = Trainer(TINY, Model(TINY), "reader", steps=60)
    same = batch(30, 0, 8)
    losses = [trainer.train_step(same) for _ in range(40)]
    assert losses[-1] < 0.4 * losses[0]


def test_the_decoder_stage_leaves_latents_unchanged() -> None:
    pictures, nothing = (
        tensor([one.picture for one in batch(30, 0, 2)]),
        torch.zeros(1, TINY.latents, 8, 8),
    )
    vae = (model := Model(TINY)).vae
    latents, back = vae.encode(pictures).latent_dist.mean, vae.decode(nothing).sample
    trainer = Trainer(TINY, model, "decoder", steps=4)
    for step in trainer.batches():
        trainer.train_step(step)
    assert torch.equal(vae.encode(pictures).latent_dist.mean, latents)
    assert not torch.equal(vae.decode(nothing).sample, back)


def test_the_scheduler_follows_the_velocity() -> None:
    """Start from noise and use the exact velocity, noise minus picture."""
    scheduler = build_scheduler(TINY)
    picture = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(1))
    sample = (
        torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(2))
        * scheduler.init_noise_sigma
    )
    scheduler.set_timesteps(12)
    assert float(scheduler.timesteps[0]) > 990
    for step, timestep in enumerate(scheduler.timesteps):
        share = float(scheduler.sigmas[step])
        assert float(timestep) / 1000 == pytest.approx(share, abs=2e-3), (
            "it is cut to a whole number"
        )
        direction = (sample - picture) / share
        sample = scheduler.step(direction, timestep, sample, return_dict=False)[0]
    torch.testing.assert_close(sample, picture, atol=1e-2, rtol=0)


def test_the_service_draws_what_diffusers_draws(tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = Model(TINY)
    for parameter in model.painter.parameters():
        torch.nn.init.normal_(parameter, std=0.1)  # a fresh one draws the same whatever it is told
    model.save(tmp_path)
    [due] = generate(load(tmp_path), ["two red circles"], steps=4, seed=3)
    drawn = PictureRequest(prompt="two red circles", steps=4, seed=3, guidance_scale=GUIDANCE)
    with RecordingEngine(tmp_path, threads=1, text_length=TINY.prompt_tokens) as recording:
        circles, star = recording.draw(drawn, replace(drawn, prompt="a star"))
    assert_alike(circles, due.astype(np.int64))
    assert np.abs(circles - star).max() > 3
