"""Write tiny rankers with random weights, as sentence-transformers and others save them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

LONGEST = 96  # tokens of a pair
BEGIN, PADDING, END, UNKNOWN, MASK = "<s>", "<pad>", "</s>", "<unk>", "<mask>"
MARKERS = ("[unused0]", "[unused1]")
TURN, CLOSE = "<|im_start|>", "<|im_end|>"
_WORDS = [
    *"abcdefghijklmnopqrstuvwxyz",
    *(f"{a}{b}" for a in "bdgkmns" for b in "aeiou"),
    *("yes", "no", "query:", "text:", ".", ",", "[", "]", "unused0", "unused1"),
]
VOCABULARY = 160
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "pad_token_id": 1,
}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}<|im_start|> {{ m.content }} <|im_end|> "
    "{% elif m.role == 'query' %}<|im_start|> query: {{ m.content }} "
    "{% elif m.role == 'document' %}text: {{ m.content }} <|im_end|> {% endif %}{% endfor %}no , yes"
)


def bert() -> Any:
    return BertForSequenceClassification(
        BertConfig(**SIZES, num_labels=1, max_position_embeddings=LONGEST)
    )


def xlm_roberta() -> Any:
    sizes = SIZES | {"type_vocab_size": 1}
    return XLMRobertaForSequenceClassification(
        XLMRobertaConfig(**sizes, num_labels=1, max_position_embeddings=LONGEST + 2)
    )


def distilbert() -> Any:
    sizes = {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
    return DistilBertForSequenceClassification(
        DistilBertConfig(**sizes, pad_token_id=1, num_labels=1, max_position_embeddings=LONGEST)
    )


def modernbert(pooling: str = "mean") -> Any:
    special = {"bos_token_id": 0, "cls_token_id": 0, "eos_token_id": 2, "sep_token_id": 2}
    layers = {"local_attention": 16, "layer_types": ["full_attention", "sliding_attention"]}
    return ModernBertForSequenceClassification(
        ModernBertConfig(
            **SIZES,
            **special,
            **layers,
            num_labels=1,
            classifier_pooling=pooling,
            max_position_embeddings=LONGEST,
        )
    )


def qwen3() -> Any:
    sizes = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
    return Qwen3ForSequenceClassification(
        Qwen3Config(**sizes, num_labels=1, max_position_embeddings=LONGEST)
    )


FAMILIES: dict[str, Callable[[], Any]] = {
    made.__name__: made for made in (bert, xlm_roberta, distilbert, modernbert, qwen3)
}
# Ranks of other classes that are compared with sentence-transformers, by `model_type`.
OTHER_RANKERS = {
    "bert": ("BertModel with a projection (ColBERT)", "late interaction"),
    "qwen3": ("Qwen3ForCausalLM", "yes or no"),
}


def tokenizer(*, types: bool = True, decodes: bool = False) -> PreTrainedTokenizerFast:
    """Return a tokenizer of words with a template for pairs; everything else is unknown."""
    pieces = [BEGIN, PADDING, END, UNKNOWN, MASK, TURN, CLOSE, *MARKERS, *_WORDS]
    made = Tokenizer(
        models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token=UNKNOWN)
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens([BEGIN, PADDING, END, UNKNOWN, MASK, TURN, CLOSE])
    if not decodes:
        made.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A {END}",
            pair=f"{BEGIN} $A {END} $B:1 {END}:1",
            special_tokens=[(BEGIN, 0), (END, 2)],
        )
    names = {
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PADDING,
        "unk_token": UNKNOWN,
        "sep_token": END,
        "cls_token": BEGIN,
        "mask_token": MASK,
    }
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        **names,
        model_max_length=LONGEST,
        model_input_names=inputs if types else [inputs[0], inputs[2]],
    )


def cross_encoder(path: Path, family: str = "bert", **config: Any) -> Path:
    """Write a folder of a model for sequence classification, as transformers saves it."""
    model = _random(FAMILIES[family]())
    model.save_pretrained(path)
    tokenizer(types=family == "bert").save_pretrained(path)
    _amend(path / "config.json", config)
    return path


def language_model(path: Path, *, template: str | None = TEMPLATE) -> Path:
    """Write a folder of a causal language model whose template renders pairs."""
    sizes = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
    config = Qwen3Config(**sizes, max_position_embeddings=4 * LONGEST)
    _random(Qwen3ForCausalLM(config)).save_pretrained(path)
    made = tokenizer(types=False, decodes=True)
    made.padding_side = "left"
    made.model_max_length = 4 * LONGEST
    made.chat_template = template
    made.save_pretrained(path)
    return path


def stanford_colbert(path: Path, **metadata: Any) -> Path:
    """Write a folder as Stanford's ColBERT: a BERT with its projection beside it."""
    _random(BertModel(BertConfig(**SIZES, max_position_embeddings=LONGEST))).save_pretrained(path)
    tokenizer().save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    torch.manual_seed(3)
    named = {f"bert.{name}": tensor for name, tensor in weights.items()}
    projection = {"linear.weight": torch.randn(16, 32) / 6}
    save_file(named | projection, path / "model.safetensors", {"format": "pt"})
    _amend(path / "config.json", {"architectures": ["HF_ColBERT"]})
    (path / "artifact.metadata").write_text(json.dumps(metadata))
    return path


def pylate(path: Path, *, dense: int = 16, **settings: Any) -> Path:
    """Write a folder as PyLate 1 to 3 does: a transformer and a dense layer."""
    _random(BertModel(BertConfig(**SIZES, max_position_embeddings=LONGEST))).save_pretrained(path)
    tokenizer().save_pretrained(path)
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    said = {"model_type": "ColBERT", "query_prefix": "[unused0]", "document_prefix": "[unused1]"}
    (path / "config_sentence_transformers.json").write_text(json.dumps(said | settings))
    (path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": LONGEST}))
    folder = path / "1_Dense"
    folder.mkdir()
    identity = "torch.nn.modules.linear.Identity"
    layer = {"in_features": 32, "out_features": dense, "bias": False}
    (folder / "config.json").write_text(json.dumps(layer | {"activation_function": identity}))
    torch.manual_seed(4)
    save_file({"linear.weight": torch.randn(dense, 32) / 6}, folder / "model.safetensors")
    return path


def _random(model: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.eval().named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.5 if "embed" in name else 0.2)
    return model


def _amend(path: Path, more: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
