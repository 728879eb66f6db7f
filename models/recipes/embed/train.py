"""Train pocket-embed: `python models/recipes embed.train --out models/pocket-embed`.

A BERT is trained contrastively (InfoNCE: van den Oord et al., 2018): the positive of every anchor
must be nearer than all other texts of the batch, its hard negative included. The folder is in
sentence-transformers' form, which transformers loads too. Batches are a function of (seed, step); a
run that is stopped continues with `--resume`.

Shapes: B triplets · T tokens · D size of a vector.
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

from recipes.embed.data import Triplet, triplet, vocabulary
from recipes.training.loop import Schedule, Training, exit_on_sigterm, make_readable

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
)  # word endings in addition to single letters
MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Define every number that decides the weights."""

    seed: int = 50
    width: int = 192
    layers: int = 3
    heads: int = 6
    inner: int = 576
    vocabulary: int = 4096
    context: int = 128  # tokens
    tokenizer_triplets: int = 4000
    steps: int = 1400
    batch: int = 96
    matrix_lr: float = 0.01
    other_lr: float = 2e-3
    warmup: int = 100
    decay: float = 0.5
    temperature: float = 0.05


def build_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """Build a lower-case WordPiece tokenizer of the lexicon and the most frequent words.

    Words are counted, not trained: tokenizer trainers break ties by chance, and a resumed run needs
    the same ids.
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
    triplets = [triplet(recipe.seed, -1 - index) for index in range(recipe.tokenizer_triplets)]
    texts = [text.lower() for one in triplets for text in one[1:]]
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
    special = [(token, pieces.index(token)) for token in (BEGIN, END)]
    plain.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A {END}", special_tokens=special
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
    """Build a model whose initial weights depend on the seed alone."""
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
    """Return unit-length vectors `[texts, D]`: token means, as the folder's pooling specifies."""
    length = model.config.max_position_embeddings
    encoded = tokenizer(
        list(texts), padding=True, truncation=True, max_length=length, return_tensors="pt"
    )
    hidden_BTD = model(
        input_ids=encoded.input_ids, attention_mask=encoded.attention_mask
    ).last_hidden_state
    counts = encoded.attention_mask[..., None].to(hidden_BTD.dtype)
    return functional.normalize((hidden_BTD * counts).sum(dim=1) / counts.sum(dim=1))


def contrastive_loss(
    anchor_BD: Tensor, positive_BD: Tensor, negative_BD: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return the InfoNCE loss in both directions, and the share of correct nearest neighbours."""
    score_BB = anchor_BD @ torch.cat([positive_BD, negative_BD]).T / temperature
    own_B = torch.arange(len(anchor_BD))
    reverse_BB = positive_BD @ torch.cat([anchor_BD, negative_BD]).T / temperature
    loss = functional.cross_entropy(score_BB, own_B) + functional.cross_entropy(reverse_BB, own_B)
    return loss / 2, (score_BB.argmax(dim=1) == own_B).float().mean()


class Report(NamedTuple):
    """Hold the loss of one step and its share of correct nearest neighbours."""

    loss: float
    correct: float


class Trainer(Training[list[Triplet], Report]):
    """Train one run."""

    def __init__(self, recipe: Recipe, *, steps: int = 0) -> None:
        self.recipe = recipe
        self.tokenizer = build_tokenizer(recipe)
        self.model = build_model(recipe, self.tokenizer)
        schedule = Schedule(steps=steps or recipe.steps, warmup=recipe.warmup, decay=recipe.decay)
        super().__init__(self.model, schedule, matrix_lr=recipe.matrix_lr, other_lr=recipe.other_lr)

    def batches(self) -> Iterator[list[Triplet]]:
        """Yield the batches that are left; each triplet is used once."""
        size = self.recipe.batch
        for step in range(self.step, self.schedule.steps):
            yield [
                triplet(self.recipe.seed, index) for index in range(step * size, (step + 1) * size)
            ]

    def train_step(self, batch: list[Triplet]) -> Report:
        """Run one update."""
        texts = (
            [one.anchor for one in batch]
            + [one.positive for one in batch]
            + [one.negative for one in batch]
        )
        anchors, positives, negatives = vectors(self.model, self.tokenizer, texts).split(len(batch))
        loss, correct = contrastive_loss(anchors, positives, negatives, self.recipe.temperature)
        loss.backward()
        self.update()
        return Report(float(loss.detach()), float(correct))

    def progress(self, reports: Sequence[Report], seconds: float) -> str:
        """Format the step, mean loss, accuracy and triplets per second."""
        loss, correct = (sum(values) / len(reports) for values in zip(*reports, strict=True))
        rate = len(reports) * self.recipe.batch / seconds
        fields = {
            "step": self.step,
            "loss": round(loss, 4),
            "right": round(correct, 3),
            "cases_per_s": round(rate),
        }
        return json.dumps(fields)

    def export(self, out: Path) -> None:
        """Write the folder: float16 weights, tokenizer, sentence-transformers' files."""
        model = BertModel(self.model.config, add_pooling_layer=False)
        model.load_state_dict(self.model.state_dict())
        model.to(torch.float16).save_pretrained(out)
        self.tokenizer.save_pretrained(out)
        for name, content in sentence_transformers_files(self.recipe).items():
            (out / name).parent.mkdir(exist_ok=True)
            (out / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        for folder in (out, *(path for path in out.iterdir() if path.is_dir())):
            make_readable(folder)


def sentence_transformers_files(recipe: Recipe) -> dict[str, object]:
    """Return the content of sentence-transformers' files by name."""
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
    settings: dict[str, object] = {
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
        "config_sentence_transformers.json": settings,
    }


def main() -> None:
    from recipes.embed.evaluate import report

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the checkpoint folder to write")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--state", type=Path, default=Path(".cache/pocket-embed/state.pt"))
    parser.add_argument("--resume", action="store_true", help="continue from --state if it exists")
    args = parser.parse_args()
    exit_on_sigterm()
    trainer = Trainer(Recipe(seed=args.seed), steps=args.steps)
    if args.resume and args.state.exists():
        trainer.load_state(args.state)
    trainer.run(args.state, every=240.0)
    trainer.export(args.out)
    print(json.dumps(report(args.out), indent=1))


if __name__ == "__main__":
    main()
