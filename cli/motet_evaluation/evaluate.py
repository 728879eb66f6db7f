"""Measure the quality of one engine setting: `python -m motet_evaluation.evaluate MODEL`.

`motet eval` runs it for each setting. Prints one line of JSON: the loaded formats, their memory,
the perplexity of texts (without any, of the right answers), and the share of tasks whose greedy
answer was right, by category.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from motet_llm.config import EngineConfig
from motet_llm.disaggregation.kv_transfer import token_bytes
from motet_llm.engine.engine import Engine
from motet_shared.errors import ConfigError, MotetError
from motet_shared.messages import Sampling

from .scoring import log_probabilities
from .tasks import Task, read_tasks

MAX_ANSWER = 96  # tokens
WINDOW = 1024  # tokens of a text per window, which bounds the context of a prediction


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit code: 0 success, 1 failure, 2 wrong setting."""
    parser = argparse.ArgumentParser(
        prog="python -m motet_evaluation.evaluate", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("model", help="folder of the checkpoint")
    parser.add_argument(
        "--setting",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="field of EngineConfig; repeatable",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        action="append",
        default=[],
        type=Path,
        help="text for perplexity; repeatable",
    )
    parser.add_argument(
        "--tasks",
        metavar="FILE",
        type=Path,
        help="JSON lines of questions and answers, for accuracy",
    )
    parser.add_argument("--limit", type=int, default=0, help="most tasks of each category; 0: all")
    parser.add_argument("--window", type=int, default=WINDOW, help="tokens per window of a text")
    args = parser.parse_args(argv)
    try:
        print(json.dumps(evaluate(args)))
    except MotetError as error:
        print(error.message, file=sys.stderr)
        return 2 if error.code == "config" else 1
    return 0


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Return the results as a JSON object. Raises ConfigError for unusable options or files."""
    began = time.perf_counter()
    if not (args.text or args.tasks):
        raise ConfigError("--text, --tasks: give at least one of them", param="--text")
    if args.window < 2:
        raise ConfigError(
            f"--window: {args.window} is too few; give at least 2 tokens", param="--window"
        )
    tasks = limited(read_tasks(args.tasks), args.limit) if args.tasks else []
    engine = Engine(engine_config(args.model, args.setting))
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        runner = engine.runner
        found = {
            "model": str(args.model),
            "chosen": runner.describe(),
            "weight_bytes": runner.weight_bytes,
            "kv_bytes_per_token": sum(
                token_bytes(runner.kv, layer) for layer in runner.kv.group_of
            ),
            **_perplexity(engine, tokenizer, args.text, tasks, args.window),
            **_accuracy(engine, tokenizer, tasks),
            **_draft_counts(engine),
        }
    finally:
        engine.close()
    return found | {"seconds": time.perf_counter() - began}


def engine_config(model: str, settings: Iterable[str]) -> EngineConfig:
    """Parse settings NAME=VALUE into an engine config.

    Raises ConfigError that names an unknown setting or an invalid value.
    """
    kinds = get_type_hints(EngineConfig)
    known = [field.name for field in fields(EngineConfig) if field.name != "model"]
    values: dict[str, Any] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in known or kinds[name] not in (str, int, float, bool):
            raise ConfigError(
                f"--setting: {setting!r} is unknown; give one of {', '.join(known)}, as weights=int8",
                param="--setting",
            )
        values[name] = _value(name, value, kinds[name])
    return EngineConfig(model=model, **values)


def _value(name: str, value: str, kind: Any) -> Any:
    if kind is bool:
        if value not in ("true", "false"):
            raise ConfigError(
                f"--setting: {name}={value!r} is not a bool; give true or false", param="--setting"
            )
        return value == "true"
    try:
        return kind(value)
    except ValueError as error:
        raise ConfigError(
            f"--setting: {name}={value!r} is not a number; give one", param="--setting"
        ) from error


def limited(tasks: Sequence[Task], limit: int) -> list[Task]:
    """Return the first `limit` tasks of each category; 0: all."""
    taken: dict[str, int] = defaultdict(int)
    kept = []
    for task in tasks:
        taken[task.category] += 1
        if not limit or taken[task.category] <= limit:
            kept.append(task)
    return kept


# ---------------------------------------------------------------------------------------------------------- perplexity
def _perplexity(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Path],
    tasks: Sequence[Task],
    window: int,
) -> dict[str, Any]:
    runner, rule = engine.runner, engine.config.heavy_hitters
    logprobs: list[float] = []
    for tokens, first in (
        _windows(tokenizer, texts, min(window, runner.context))
        if texts
        else _answers(tokenizer, tasks)
    ):
        watch = None if rule is None else rule.watch(first)
        logprobs += log_probabilities(runner, tokens, watch)[first - 1 :]
    if not logprobs:
        raise ConfigError("--text: has fewer than two tokens; give more text", param="--text")
    of = "texts" if texts else "answers"
    return {
        "perplexity": math.exp(-sum(logprobs) / len(logprobs)),
        "perplexity_of": of,
        "tokens": len(logprobs),
    }


def _windows(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[Path], window: int
) -> Iterable[tuple[list[int], int]]:
    """Yield windows of the texts, and the index of the first token to score in each."""
    for path in texts:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--text: {str(path)!r} cannot be read: {error}; give a text file in UTF-8",
                param="--text",
            ) from error
        ids = tokenizer.encode(text, add_special_tokens=False)
        yield from ((ids[at : at + window], 1) for at in range(0, len(ids), window))


def _answers(
    tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task]
) -> Iterable[tuple[list[int], int]]:
    """Yield tokens of questions with their right answers, and the index of the answer."""
    for task in tasks:
        prompt = _prompt(tokenizer, task)
        yield prompt + tokenizer.encode(task.answer, add_special_tokens=False), len(prompt)


def _prompt(tokenizer: PreTrainedTokenizerBase, task: Task) -> list[int]:
    """Return a task's prompt by the model's chat template, or the plain contents without one."""
    messages = [dict(message) for message in task.messages]
    if getattr(tokenizer, "chat_template", None) is None:
        return list(tokenizer.encode("\n".join(str(message["content"]) for message in messages)))
    tools = [dict(tool) for tool in task.tools] or None
    text = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer.encode(text, add_special_tokens=False))


# ------------------------------------------------------------------------------------------------------------ accuracy
def _accuracy(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task]
) -> dict[str, Any]:
    right: dict[str, int] = defaultdict(int)
    counts: dict[str, int] = defaultdict(int)
    for task, reply in zip(tasks, answers(engine, tokenizer, tasks), strict=True):
        counts[task.category] += 1
        right[task.category] += task.is_right(reply)
    if not counts:
        return {}
    by_category = {category: right[category] / count for category, count in counts.items()}
    return {
        "accuracy": sum(right.values()) / len(tasks),
        "accuracy_by_category": by_category,
        "questions": len(tasks),
    }


def _draft_counts(engine: Engine) -> dict[str, Any]:
    """Return the counts of drafted and accepted tokens, if any were drafted."""
    stats = engine.stats()
    return {
        name: int(stats[name])
        for name in ("drafted_tokens", "accepted_tokens")
        if stats.get("drafted_tokens")
    }


def answers(engine: Engine, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task]) -> list[str]:
    """Return greedy answers, computed as many at a time as the engine allows."""
    replies: list[list[int]] = [[] for _ in tasks]
    waiting = list(enumerate(tasks))[::-1]
    running = 0
    while waiting or engine.has_work:
        while waiting and running < engine.config.max_running:
            number, task = waiting.pop()
            sampling = Sampling(max_tokens=MAX_ANSWER, temperature=0)
            engine.add(number, _prompt(tokenizer, task), sampling)
            running += 1
        for output in engine.step():
            replies[int(str(output.key))] += output.ids
            if output.error is not None:
                raise output.error
            running -= output.finish is not None
    ends = engine.runner.eos_ids
    return [tokenizer.decode([token for token in ids if token not in ends]) for ids in replies]


if __name__ == "__main__":
    sys.exit(main())
