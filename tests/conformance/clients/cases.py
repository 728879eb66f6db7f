"""Run the cases of a client, each by itself, and print as JSON what came out.

A client's script runs in an environment of its own, so it imports nothing of the project but this.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import traceback
from collections.abc import Callable
from typing import Any

URL = os.environ.get("MOTET_URL", "http://127.0.0.1:8000")
V1 = f"{URL}/v1"
KEY = "none"
MODEL = "pocket-chat"
QUESTION = "There is a red circle, a blue square and a green star. What do you see?"
ANSWER = "red circle"  # is in the answer
WISH = "Draw two red circles."  # upon which the model calls the tool `draw`
TOOL_SCHEMA = {
    "type": "object",
    "properties": {"prompt": {"type": "string"}},
    "required": ["prompt"],
}

_cases: list[Callable[[], Any]] = []


def case(run: Callable[[], Any]) -> Callable[[], Any]:
    """Register a function, or a coroutine function, as a case of its name; it raises if it fails."""
    _cases.append(run)
    return run


def main(package: str, version: str = "") -> None:
    """Run all cases of a client; the last line printed is the result.

    version: of what is tested, if it is not that of `package`.
    """
    found = []
    for run in _cases:
        error = ""
        try:
            made = run()
            if asyncio.iscoroutine(made):
                asyncio.run(asyncio.wait_for(made, 60))
        except Exception as problem:
            traceback.print_exc()
            error = f"{type(problem).__name__}: {problem}"[:300]
        found.append({"name": run.__name__, "error": error})
    version = version or importlib.metadata.version(package)
    print("\n" + json.dumps({"version": version, "cases": found}), flush=True)
