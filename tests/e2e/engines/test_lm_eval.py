"""EleutherAI's lm-eval over /v1/completions, unmodified: its scores are those of transformers."""

from __future__ import annotations

import json
import subprocess
import venv
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from conformance.outcome import record
from e2e.stack import MotetStack

pytestmark = [pytest.mark.slow, pytest.mark.extended("conformance"), pytest.mark.timeout(1500)]

MODEL = Path(__file__).parents[3] / "models" / "pocket-chat"
PACKAGES = ("lm-eval[api]==0.4.13", "transformers==5.23.0")
BOUND = (
    0.02  # of a log-probability, relative: the service computes in the type that fits its processor
)
QUESTIONS = [
    ("There is a red circle. What do you see? I see", ["a red circle", "a blue square"], 0),
    ("The circle is left of the star. Where is the star?", ["At the right", "At the left"], 0),
    ("Question: How many circles are there? Answer:", ["two circles", "a voice", "blue"], 1),
]
TASKS: dict[str, dict[str, Any]] = {
    "motet_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    },
    "motet_generate": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 12, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def lm_eval(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command in an environment of its own."""
    folder = tmp_path_factory.mktemp("lm_eval")
    venv.create(folder, with_pip=True)
    install = (str(folder / "bin/python"), "-m", "pip", "install", "--quiet", *PACKAGES)
    subprocess.run(install, check=True, timeout=900)
    return folder / "bin" / "lm_eval"


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    names = ("question", "choices", "answer")
    lines = [json.dumps(dict(zip(names, one, strict=True))) for one in QUESTIONS]
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n")
    data: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "questions.jsonl")}},
        "test_split": "test",
    }
    for name, task in TASKS.items():
        # JSON is YAML, too.
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name} | data | task))
    return folder


def run(
    lm_eval: Path, tasks: Path, stack: MotetStack, out: Path
) -> dict[str, list[dict[str, Any]]]:
    """Return the samples of all tasks."""
    options = {
        "model": "pocket-chat",
        "base_url": f"{stack.url}/v1/completions",
        "tokenizer": str(MODEL),
        "num_concurrent": "4",
    }
    joined = ",".join(f"{name}={value}" for name, value in options.items())
    command = [str(lm_eval), "--model", "local-completions", "--model_args", joined]
    command += ["--tasks", ",".join(TASKS), "--include_path", str(tasks)]
    command += ["--output_path", str(out), "--log_samples"]
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(out / "hf"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = {}
    for name in TASKS:
        (path,) = out.rglob(f"samples_{name}_*.jsonl")
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        found[name] = sorted(samples, key=lambda sample: int(sample["doc_id"]))
    return found


@torch.inference_mode()
def score(model: Any, tokenizer: Any, context: str, continuation: str) -> float:
    """Return the log-probability of a continuation, as lm-eval defines it."""
    whole = tokenizer(context + continuation)["input_ids"]
    start = len(tokenizer(context)["input_ids"])
    rows = model(torch.tensor([whole])).logits[0].float().log_softmax(-1)
    return sum(float(rows[at - 1, whole[at]]) for at in range(start, len(whole)))


def test_tasks_give_what_transformers_gives(
    lm_eval: Path, tasks: Path, stack: MotetStack, tmp_path: Path
) -> None:
    samples = run(lm_eval, tasks, stack, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForImageTextToText.from_pretrained(MODEL, dtype=torch.float32).eval()
    for sample in samples["motet_choice"]:
        requests = [tuple(one.values()) for one in sample["arguments"].values()]
        wanted = [score(model, tokenizer, *one) for one in requests]
        scores = [float(one[0][0]) for one in sample["resps"]]
        assert scores == pytest.approx(wanted, rel=BOUND)
        assert sample["acc"] == (max(wanted) == wanted[sample["doc"]["answer"]])
    for sample in samples["motet_generate"]:
        ids = tokenizer(sample["doc"]["question"], return_tensors="pt")["input_ids"]
        reply = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        text = tokenizer.decode(reply, skip_special_tokens=True).split("\n")[0]
        assert sample["resps"][0][0] == text
    version = PACKAGES[0].partition("==")[2]
    assert not record("lm-eval", "lm-eval", version, dict.fromkeys(TASKS, ""), {})
