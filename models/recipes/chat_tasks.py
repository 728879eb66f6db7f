"""The held-out questions as JSON lines for `motet eval`: `python models/recipes/chat_tasks.py models/pocket-chat`.

A line has the messages, the declared tools, the right answer as the template writes it, and the category.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from transformers import AutoTokenizer

from chat_stream import held_out
from evaluate import expected


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="whose template writes the answers")
    parser.add_argument(
        "--per-category", type=int, help="only the first so many questions of each category"
    )
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    for category, items in held_out().items():
        for item in items[: args.per_category]:
            task = {
                "category": category,
                "messages": list(item.messages[:-1]),
                "tools": list(item.tools),
            }
            print(json.dumps(task | {"answer": expected(item, tokenizer)}, ensure_ascii=False))


if __name__ == "__main__":
    main()
