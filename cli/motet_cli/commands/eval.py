"""Compare engine settings by the quality and the memory of a model: `motet eval`.

Each setting runs as a process of its own (`python -m motet_evaluation.evaluate`), one after the
other, so that memory is measured separately. The first row is the model without changes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from motet_cli.checkpoints.model_folders import locate
from motet_models.capacity import format_bytes
from motet_shared.errors import ConfigError, InternalError

DEFAULTS = (
    "weights=int8",
    "weights=int4",
    "weights=float8",
    "kv_dtype=int8",
    "kv_dtype=float8_e4m3fn",
)
UNCHANGED = "unchanged"
_POCKET = "pocket-chat"


@dataclass(frozen=True)
class Setting:
    """Represent a row of the comparison.

    name: the setting as it was given.
    model: folder of the checkpoint.
    options: settings of the engine, NAME=VALUE each.
    """

    name: str
    model: Path
    options: tuple[str, ...] = ()


def run(args: Namespace) -> int:
    _, model = locate(args.model, "MODEL")
    settings = [
        Setting(UNCHANGED, model),
        *(parse_setting(text, model) for text in args.setting or DEFAULTS),
    ]
    for name, least in (("limit", 0), ("window", 2), ("timeout", 1)):
        if getattr(args, name) < least:
            raise ConfigError(
                f"--{name}: {getattr(args, name)}: give at least {least}", param=f"--{name}"
            )
    texts = [_file(path, "--text") for path in args.text]
    with _tasks(args, model, bool(texts)) as tasks:
        found = [_evaluate(setting, texts, tasks, args) for setting in settings]
    if args.json:
        print(json.dumps({"settings": found}, indent=1))
    else:
        Console().print(table(found))
    return 0


def parse_setting(text: str, model: Path) -> Setting:
    """Parse `NAME=VALUE,…`, where `model=FOLDER` names another checkpoint to compare.

    Raises ConfigError.
    """
    options = []
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not (name and equals and value):
            raise ConfigError(
                f"--setting: {text!r}: give NAME=VALUE,… such as weights=int8,kv_dtype=int8",
                param="--setting",
            )
        if name == "model":
            _, model = locate(value, "model")
        else:
            options.append(part)
    return Setting(text, model, tuple(options))


def _file(path: str, flag: str) -> Path:
    found = Path(path).expanduser().resolve()
    if not found.is_file():
        raise ConfigError(f"{flag}: {path!r} is not a file; give an existing one", param=flag)
    return found


@contextmanager
def _tasks(args: Namespace, model: Path, has_texts: bool) -> Iterator[Path | None]:
    """Yield the file of tasks: that of --tasks, or pocket-chat's held-out questions.

    Yields None if only texts are evaluated.
    """
    if args.tasks:
        yield _file(args.tasks, "--tasks")
        return
    recipes = model.parent / "recipes"
    if model.name != _POCKET or not recipes.is_dir():
        if not has_texts:
            raise ConfigError(
                "--text, --tasks: give at least one of them; only pocket-chat has questions of its own"
            )
        yield None
        return
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        many = ["--per-category", str(args.limit)] if args.limit else []
        file.write(
            _output([sys.executable, str(recipes), "chat.tasks", str(model), *many], args.timeout)
        )
        file.flush()
        yield Path(file.name)


def _evaluate(
    setting: Setting, texts: Sequence[Path], tasks: Path | None, args: Namespace
) -> dict[str, Any]:
    """Return one row of the table, as the setting's process printed it."""
    argv = [
        sys.executable,
        "-m",
        "motet_evaluation.evaluate",
        str(setting.model),
        "--limit",
        str(args.limit),
    ]
    argv += ["--window", str(args.window)]
    argv += [part for option in setting.options for part in ("--setting", option)]
    argv += [part for text in texts for part in ("--text", str(text))]
    if tasks is not None:
        argv += ["--tasks", str(tasks)]
    print(f"{setting.name} …", file=sys.stderr, flush=True)
    found: dict[str, Any] = json.loads(_output(argv, args.timeout).splitlines()[-1])
    return {"setting": setting.name, **found}


def _output(argv: Sequence[str], timeout: float) -> str:
    """Run a process and return its standard output.

    Raises ConfigError or InternalError with its last line if it fails or exceeds `timeout` seconds.
    """
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise InternalError(
            f"--timeout: not complete after {timeout:g} s; give more, or a --limit"
        ) from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise (ConfigError if done.returncode == 2 else InternalError)(last[0])
    return done.stdout


def table(found: Sequence[dict[str, Any]]) -> Table:
    """Return a table of settings, each with its differences from the first one."""
    first = found[0]
    chosen = first["chosen"]
    caption = f"{UNCHANGED}: weights {chosen['weights']}, KV {chosen['kv_dtype']}"
    caption += f"; perplexity of the {first['perplexity_of']}"
    shown = Table(box=box.SIMPLE, header_style="bold", caption=caption, caption_justify="left")
    shown.add_column("setting", overflow="fold", min_width=16)
    for name in ("memory", "KV per token", "perplexity", "accuracy", ""):
        shown.add_column(name, justify="right" if name else "left", no_wrap=bool(name))
    for one in found:
        shown.add_row(
            one["setting"].replace(",", ", "),  # a place for a line break
            format_bytes(one["weight_bytes"]),
            format_bytes(one["kv_bytes_per_token"]),
            f"{one['perplexity']:.4f}",
            f"{one['accuracy']:.1%}" if "accuracy" in one else "",
            "" if one is first else _difference(first, one),
        )
    return shown


def _difference(first: dict[str, Any], one: dict[str, Any]) -> str:
    """Return a setting's difference from the first one.

    Names the change of perplexity, the category that loses most accuracy, and the acceptance rate
    of drafts.
    """
    parts = [f"perplexity {one['perplexity'] / first['perplexity'] - 1:+.1%}"]
    ours, theirs = one.get("accuracy_by_category", {}), first.get("accuracy_by_category", {})
    changes = {name: value - theirs[name] for name, value in ours.items() if name in theirs}
    if changes:
        worst = min(changes, key=lambda name: changes[name])
        if changes[worst] < 0:
            parts.append(f"{worst} {100 * changes[worst]:+.1f} points")
    if drafted := one.get("drafted_tokens"):
        parts.append(f"{one['accepted_tokens'] / drafted:.0%} of {drafted:,} draft tokens accepted")
    return ", ".join(parts)
