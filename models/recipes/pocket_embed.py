"""Train the pocket-embed model: `python models/recipes/pocket_embed.py --out models/pocket-embed`.

A BERT whose texts are near each other where they say the same. Each batch is a list of cases: of every text, the other
wording must be nearer than all other texts of the batch, and than the one that differs in a single thing (InfoNCE:
van den Oord et al., 2018). The folder is one of sentence-transformers, which transformers loads too. Batches are a
function of (seed, step); a run that is stopped goes on with `--resume`.

Shapes: B cases · D numbers of a vector.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from torch.nn import functional
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from embed_data import Case, case, vocabulary
from training import Schedule, Training, end_on_sigterm, readable

BEGIN, PADDING, END, UNKNOWN = "[CLS]", "[PAD]", "[SEP]", "[UNK]"
ENDINGS = (
    "es",
    "ed",
    "ing",
    "er",
    "est",
    "ly",
    "th",
    "teen",
    "ty",
)  # pieces of words besides letters
MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the weights."""

    seed: int = 50
    width: int = 192
    layers: int = 3
    heads: int = 6
    inner: int = 576
    vocabulary: int = 4096
    context: int = 128  # tokens
    tokenizer_cases: int = 4000
    steps: int = 1400
    batch: int = 96
    matrix_lr: float = 0.01
    other_lr: float = 2e-3
    warmup: int = 100
    decay: float = 0.5
    temperature: float = 0.05


def build_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """Words in lower case: those of the lexicon and the most frequent ones of the first cases; others fall into pieces.

    Counted, not trained: the trainers of tokenizers break ties by chance, and a run that is resumed needs the same ids.
    """
    letters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    pieces = [
        PADDING,
        UNKNOWN,
        BEGIN,
        END,
        *letters,
        *(f"##{piece}" for piece in (*letters, *ENDINGS)),
    ]
    cases = [case(recipe.seed, -1 - index) for index in range(recipe.tokenizer_cases)]
    texts = [text.lower() for one in cases for text in one[1:]]
    counts = Counter(word for text in texts for word in re.findall(r"[a-z]{2,}|\d{2,}", text))
    counts.update(word for text in vocabulary() for word in re.findall(r"[a-z]{2,}", text.lower()))
    pieces += sorted(counts, key=lambda word: (-counts[word], word))[
        : recipe.vocabulary - len(pieces)
    ]
    plain = Tokenizer(
        models.WordPiece({piece: number for number, piece in enumerate(pieces)}, unk_token=UNKNOWN)
    )
    plain.normalizer = normalizers.BertNormalizer(lowercase=True)
    plain.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    plain.decoder = decoders.WordPiece()
    marks = [(mark, pieces.index(mark)) for mark in (BEGIN, END)]
    plain.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A {END}", special_tokens=marks
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=plain,
        cls_token=BEGIN,
        sep_token=END,
        pad_token=PADDING,
        unk_token=UNKNOWN,
        model_max_length=recipe.context,
    )


def build_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> BertModel:
    """A fresh model; its initialization depends on the seed alone."""
    torch.manual_seed(recipe.seed)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.width,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        intermediate_size=recipe.inner,
        max_position_embeddings=recipe.context,
        type_vocab_size=1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=tokenizer.pad_token_id,
    )
    return BertModel(config, add_pooling_layer=False)


def vectors(model: BertModel, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> Tensor:
    """`[texts, D]` of unit length: means of the tokens, as the folder says."""
    length = model.config.max_position_embeddings
    given = tokenizer(
        list(texts), padding=True, truncation=True, max_length=length, return_tensors="pt"
    )
    hidden_BTD = model(
        input_ids=given.input_ids, attention_mask=given.attention_mask
    ).last_hidden_state
    counts = given.attention_mask[..., None].to(hidden_BTD.dtype)
    return functional.normalize((hidden_BTD * counts).sum(dim=1) / counts.sum(dim=1))


def contrast(
    text_BD: Tensor, same_BD: Tensor, near_BD: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """The loss, in both directions, and the share of texts whose nearest is the other wording."""
    score_BB = text_BD @ torch.cat([same_BD, near_BD]).T / temperature
    due = torch.arange(len(text_BD))
    back_BB = same_BD @ torch.cat([text_BD, near_BD]).T / temperature
    loss = (functional.cross_entropy(score_BB, due) + functional.cross_entropy(back_BB, due)) / 2
    return loss, (score_BB.argmax(dim=1) == due).float().mean()


class Report(NamedTuple):
    loss: float
    right: float


class Trainer(Training[list[Case], Report]):
    """One run."""

    def __init__(self, recipe: Recipe, *, steps: int = 0) -> None:
        self.recipe = recipe
        self.tokenizer = build_tokenizer(recipe)
        self.model = build_model(recipe, self.tokenizer)
        schedule = Schedule(steps=steps or recipe.steps, warmup=recipe.warmup, decay=recipe.decay)
        super().__init__(self.model, schedule, matrix_lr=recipe.matrix_lr, other_lr=recipe.other_lr)

    def batches(self) -> Iterator[list[Case]]:
        """Every case is used once."""
        size = self.recipe.batch
        for step in range(self.step, self.schedule.steps):
            yield [case(self.recipe.seed, index) for index in range(step * size, (step + 1) * size)]

    def train_step(self, batch: list[Case]) -> Report:
        texts = (
            [one.text for one in batch] + [one.same for one in batch] + [one.near for one in batch]
        )
        text, same, near = vectors(self.model, self.tokenizer, texts).split(len(batch))
        loss, right = contrast(text, same, near, self.recipe.temperature)
        loss.backward()
        self.update()
        return Report(float(loss.detach()), float(right))

    def progress(self, reports: Sequence[Report], seconds: float) -> str:
        """Step, mean loss, share of right neighbours, cases per second."""
        loss, right = (sum(values) / len(reports) for values in zip(*reports, strict=True))
        rate = len(reports) * self.recipe.batch / seconds
        said = {
            "step": self.step,
            "loss": round(loss, 4),
            "right": round(right, 3),
            "cases_per_s": round(rate),
        }
        return json.dumps(said)

    def export(self, out: Path) -> None:
        """The folder: half-precision weights, tokenizer, and what sentence-transformers wants to know."""
        model = BertModel(self.model.config, add_pooling_layer=False)
        model.load_state_dict(self.model.state_dict())
        model.to(torch.float16).save_pretrained(out)
        self.tokenizer.save_pretrained(out)
        for name, said in layout(self.recipe).items():
            (out / name).parent.mkdir(exist_ok=True)
            (out / name).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
        for folder in (out, *(path for path in out.iterdir() if path.is_dir())):
            readable(folder)


def layout(recipe: Recipe) -> dict[str, object]:
    """The files of sentence-transformers, by name."""
    paths = ["" if index == 0 else f"{index}_{kind}" for index, kind in enumerate(MODULES)]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, (kind, path) in enumerate(zip(MODULES, paths, strict=True))
    ]
    texts: dict[str, object] = {
        "prompts": {},
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    }
    pooling = {
        "word_embedding_dimension": recipe.width,
        "pooling_mode_mean_tokens": True,
        "include_prompt": True,
    }
    return {
        "modules.json": modules,
        f"{paths[1]}/config.json": pooling,
        "sentence_bert_config.json": {"max_seq_length": recipe.context, "do_lower_case": False},
        "config_sentence_transformers.json": texts,
    }


def main() -> None:
    from embed_evaluate import report

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--state", type=Path, default=Path(".cache/pocket-embed/state.pt"))
    parser.add_argument("--resume", action="store_true", help="go on from --state if it is there")
    args = parser.parse_args()
    end_on_sigterm()
    trainer = Trainer(Recipe(seed=args.seed), steps=args.steps)
    if args.resume and args.state.exists():
        trainer.load_state(args.state)
    trainer.run(args.state, every=240.0)
    trainer.export(args.out)
    print(json.dumps(report(args.out), indent=1))


if __name__ == "__main__":
    main()
