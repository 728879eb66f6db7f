"""Print held-out questions for `motet eval`: `python models/recipes chat.tasks FOLDER`.

Each line of JSON has the messages, the declared tools, the expected answer as the template renders
it, and the category.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from transformers import AutoTokenizer

from recipes.chat.evaluate import expected
from recipes.chat.stream import held_out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder",
        type=Path,
        help="checkpoint folder whose chat template renders the expected answers",
    )
    parser.add_argument("--per-category", type=int, help="limit on the questions of each category")
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
