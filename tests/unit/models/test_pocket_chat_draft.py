"""Test pocket-chat's draft model: its recipe at a small size, and its acceptance rate."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from motet_evaluation.evaluate import answers
from motet_evaluation.tasks import read_tasks
from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from recipes.chat.train import Trainer
from recipes.chat.train_draft import DRAFT
from recipes.training.loop import Schedule

MODELS = Path(__file__).parents[3] / "models"
CHAT, FOLDER = MODELS / "pocket-chat", MODELS / "pocket-chat-draft"
QUESTIONS = (
    ("count", "A red circle is left of a blue square. How many things are in the scene?", "Two."),
    ("colour", "There is a green star above a black triangle. What colour is the star?", "Green."),
    ("sum", "What is 4 plus 5?", "9."),
    ("who", "Who are you?", ""),
)


def test_the_recipe_learns_and_keeps_the_tokenizer(tmp_path: Path) -> None:
    small = replace(DRAFT, phases=(replace(DRAFT.phases[0], batch=4),), warmup=2)
    trainer = Trainer(
        small, Schedule(steps=12, warmup=2), tokenizer=PreTrainedTokenizerFast.from_pretrained(CHAT)
    )
    reports = trainer.run(tmp_path / "state.pt")
    assert reports[-1].loss < 0.8 * reports[0].loss
    trainer.export(tmp_path / "out")
    vocabularies = [
        json.loads((folder / "tokenizer.json").read_text())["model"]
        for folder in (CHAT, tmp_path / "out")
    ]
    assert vocabularies[0] == vocabularies[1]


def test_it_is_a_tenth_of_pocket_chat() -> None:
    count = AutoModelForCausalLM.from_pretrained(FOLDER).num_parameters()
    assert count < 0.2e6


def test_most_drafts_are_accepted_and_answers_stay_equal(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    lines = (
        {"category": c, "question": question, "answer": answer} for c, question, answer in QUESTIONS
    )
    tasks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    asked = read_tasks(tasks)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(CHAT)
    said = []
    for speculate in ("off", str(FOLDER)):
        engine = Engine(
            EngineConfig(model=str(CHAT), num_blocks=64, speculate=speculate, always_speculate=True)
        )
        said.append(answers(engine, tokenizer, asked))
        stats = engine.stats()
        engine.close()
    assert said[0] == said[1]
    assert stats["accepted_tokens"] > 0.5 * stats["drafted_tokens"] > 0
