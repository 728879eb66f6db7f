"""Train pocket-chat's draft model for speculative decoding.

python models/recipes chat.train_draft --out models/pocket-chat-draft

It has pocket-chat's tokenizer and conversations, and about a tenth of its parameters. Batches are a
function of (seed, step), as pocket-chat's are.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from recipes.chat.mix import BROAD
from recipes.chat.recipe import Phase, Recipe
from recipes.chat.train import Trainer
from recipes.training.loop import Schedule

DRAFT = Recipe(
    hidden=64, intermediate=192, layers=2, heads=2, kv_heads=1, phases=(Phase(start=0, mix=BROAD),)
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint folder to write")
    parser.add_argument(
        "--chat",
        type=Path,
        default=Path("models/pocket-chat"),
        help="checkpoint folder of the target model",
    )
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--state", type=Path, default=Path(".cache/pocket-chat-draft/state.pt"))
    parser.add_argument("--resume", action="store_true", help="continue from --state")
    args = parser.parse_args()
    args.state.parent.mkdir(parents=True, exist_ok=True)
    schedule = Schedule(steps=args.steps, warmup=DRAFT.warmup, decay=DRAFT.decay)
    trainer = Trainer(DRAFT, schedule, tokenizer=PreTrainedTokenizerFast.from_pretrained(args.chat))
    if args.resume:
        trainer.load_state(args.state)
    trainer.run(args.state, log=50)
    trainer.export(args.out)


if __name__ == "__main__":
    main()
