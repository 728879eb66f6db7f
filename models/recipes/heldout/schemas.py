"""Count the schemas whose replies end: `python models/recipes heldout.schemas FOLDER`.

Two hundred JSON schemas, made here; each constrains the reply to a question, as `response_format`
does. A reply counts if it is complete within 256 tokens. The engine writes, greedily or by drawing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Hashable
from pathlib import Path
from random import Random
from typing import Any

import torch

from motet_llm.config import EngineConfig
from motet_llm.engine.engine import Engine
from motet_llm.grammar.grammar import Grammar
from motet_llm.grammar.token_spelling import Spelling
from motet_shared import messages
from motet_shared.messages import Sampling

SCHEMAS, MAX_TOKENS = 200, 256
_NAMES = (
    "id name first_name surname street zip phone brand model weight height length width speed level grade subject "
    "room floor date start end note comment reason result winner team points rank song artist genre year isbn pages "
    "currency balance rate shape colour left right position quantity sku is_new is_open enabled tags members steps"
).split()  # fmt: skip
_QUESTIONS = (
    "Describe a person.", "There is a red circle and a blue square. What do you see?", "Make up an order.",
    "Give me an example.", "Extract the data: Anna is 31 and lives in Rome.", "What is 3 + 4?", "Hello!",
    "Write a record.", "How many circles are there? There are two circles.", "Tell me about a book.",
)  # fmt: skip


def _field(rng: Random, depth: int) -> dict[str, Any]:
    kinds = (
        "text",
        "text",
        "text",
        "short",
        "choice",
        "count",
        "range",
        "share",
        "flag",
        "maybe",
        "date",
        "code",
    )
    kind = rng.choice((*kinds, "texts", "numbers", *(("object", "objects") if depth < 2 else ())))
    match kind:
        case "text":
            return {"type": "string"}
        case "short":
            return {"type": "string", "minLength": 1, "maxLength": rng.choice((10, 20, 40))}
        case "choice":
            return {"enum": rng.sample(("low", "high", "open", "closed", "a", "b", 1, 2, None), 3)}
        case "count":
            return {"type": "integer"}
        case "range":
            return {"type": "integer", "minimum": 0, "maximum": rng.choice((5, 10, 100))}
        case "share":
            return {"type": "number"}
        case "flag":
            return {"type": "boolean"}
        case "maybe":
            return {"anyOf": [{"type": "string"}, {"type": "null"}]}
        case "date":
            return {"type": "string", "format": "date"}
        case "code":
            return {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"}
        case "texts":
            limit = {} if rng.random() < 0.5 else {"maxItems": rng.randint(1, 4)}
            return {"type": "array", "items": {"type": "string"}, **limit}
        case "numbers":
            return {"type": "array", "items": {"type": "integer"}, "minItems": rng.randint(0, 2)}
        case "objects":
            return {"type": "array", "items": _record(rng, depth + 1)}
    return _record(rng, depth + 1)


def _record(rng: Random, depth: int = 0) -> dict[str, Any]:
    names = rng.sample(_NAMES, rng.randint(1, 5 if depth == 0 else 3))
    properties = {name: _field(rng, depth) for name in names}
    required = names if rng.random() < 0.8 else names[:1]
    found = {"type": "object", "properties": properties, "required": required}
    return found if rng.random() < 0.15 else {**found, "additionalProperties": False}


def schema(number: int) -> tuple[str, dict[str, Any]]:
    """Return the question and the JSON schema of example `number`, the same on every call."""
    rng = Random(f"schema {number}")
    return rng.choice(_QUESTIONS), _record(rng)


def endings(folder: Path, count: int, temperature: float) -> dict[int, str]:
    """Generate `count` replies under schemas; return by number those with incomplete JSON."""
    config = EngineConfig(model=str(folder), dtype="float32", threads=1, max_running=16)
    engine = Engine(config)
    settings = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    stops = settings["eos_token_id"]
    stops = stops if isinstance(stops, list) else [stops]
    vocab = json.loads((folder / "config.json").read_text())["text_config"]["vocab_size"]
    spelling = Spelling.load(str(folder), vocab, stops)
    tokenizer = _tokenizer(folder)
    states: dict[int, Grammar] = {}
    written: dict[Hashable, list[int]] = {number: [] for number in range(count)}
    sampling = Sampling(max_tokens=MAX_TOKENS, temperature=temperature, seed=1)
    for number in range(count):
        question, wanted = schema(number)
        grammar = Grammar(
            messages.Grammar(kind="json_schema", text=json.dumps(wanted), param="response_format"),
            spelling,
        )
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        engine.add(number, prompt, sampling, grammar_state=grammar.start())
        states[number] = grammar
    while engine.has_work:
        for output in engine.step():
            written[output.key].extend(output.ids)
    return {
        number: tokenizer.decode(ids)
        for number, ids in ((one, written[one]) for one in range(count))
        if not states[number].start([one for one in ids if one not in stops]).may_end
    }


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=SCHEMAS)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--show", type=int, default=0, help="unfinished replies to print")
    args = parser.parse_args()
    torch.set_num_threads(1)
    open_ended = endings(args.folder, args.count, args.temperature)
    for number, text in list(open_ended.items())[: args.show]:
        print(f"  {json.dumps(schema(number)[1])}\n    → {text[:300]!r}")
    print(f"{1 - len(open_ended) / args.count:.1%} of {args.count} end within {MAX_TOKENS} tokens")


if __name__ == "__main__":
    main()
