"""Write tiny sentence encoders with random weights, and compute transformers' results for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn import functional
from transformers import (
    AutoModel,
    AutoModelForTextEncoding,
    BertConfig,
    BertModel,
    CLIPConfig,
    CLIPModel,
    DistilBertConfig,
    DistilBertModel,
    ModernBertConfig,
    ModernBertModel,
    MPNetConfig,
    MPNetModel,
    NomicBertConfig,
    NomicBertModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3Model,
    RobertaConfig,
    RobertaModel,
    SiglipConfig,
    SiglipModel,
    T5Config,
    T5EncoderModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

VOCABULARY = 160
LONGEST = 96  # tokens of a text
BEGIN, PADDING, END, UNKNOWN = "<s>", "<pad>", "</s>", "<unk>"
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "pad_token_id": 1,
}


def bert() -> Any:
    return BertModel(BertConfig(**_SIZES, max_position_embeddings=LONGEST))


def roberta() -> Any:
    return RobertaModel(RobertaConfig(**_SIZES, max_position_embeddings=LONGEST + 2))


def xlm_roberta() -> Any:
    return XLMRobertaModel(XLMRobertaConfig(**_SIZES, max_position_embeddings=LONGEST + 2))


def mpnet() -> Any:
    return MPNetModel(MPNetConfig(**_SIZES, max_position_embeddings=LONGEST + 2))


def distilbert() -> Any:
    sizes = {
        "vocab_size": VOCABULARY,
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 48,
        "pad_token_id": 1,
    }
    return DistilBertModel(DistilBertConfig(**sizes, max_position_embeddings=LONGEST))


def modernbert() -> Any:
    """Write a ModernBERT in which every second layer attends to 8 tokens on each side."""
    special = {"bos_token_id": 0, "cls_token_id": 0, "eos_token_id": 2, "sep_token_id": 2}
    layers = {"local_attention": 16, "layer_types": ["full_attention", "sliding_attention"]}
    return ModernBertModel(
        ModernBertConfig(**_SIZES, **special, **layers, max_position_embeddings=LONGEST)
    )


def nomic_bert() -> Any:
    return NomicBertModel(NomicBertConfig(**_SIZES, max_position_embeddings=LONGEST))


def qwen3() -> Any:
    sizes = _SIZES | {"num_key_value_heads": 2, "head_dim": 8}
    return Qwen3Model(Qwen3Config(**sizes, max_position_embeddings=LONGEST))


def t5() -> Any:
    sizes = {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_heads": 4,
    }
    return T5EncoderModel(T5Config(**sizes, pad_token_id=1))


FAMILIES: dict[str, Callable[[], Any]] = {
    made.__name__: made
    for made in (bert, roberta, xlm_roberta, mpnet, distilbert, modernbert, nomic_bert, qwen3, t5)
}
PADDED = {"mpnet", "t5"}  # whose attention comes from nowhere but themselves


def plain(path: Path, family: str = "bert", seed: int = 0) -> Path:
    """Write a folder in transformers' form."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.5 if "embed" in name else 0.3)
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one-letter words and short syllables; everything else is unknown."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [
        *letters,
        *letters.upper(),
        *(f"{a}{b}" for a in "bdgkmns" for b in "aeiou"),
        "query:",
        "text:",
        ".",
        ",",
    ]
    pieces = [BEGIN, PADDING, END, UNKNOWN, *words]
    made = Tokenizer(
        models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token=UNKNOWN)
    )
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A {END}", special_tokens=[(BEGIN, 0), (END, 2)]
    )
    names = {"bos_token": BEGIN, "eos_token": END, "pad_token": PADDING, "unk_token": UNKNOWN}
    return PreTrainedTokenizerFast(tokenizer_object=made, **names, model_max_length=LONGEST)


def sentence_transformer(
    path: Path,
    family: str = "bert",
    *,
    pooling: dict[str, Any] | None = None,
    dense: int = 0,
    normalize: bool = True,
    prompts: dict[str, str] | None = None,
    default_prompt: str | None = None,
    settings: dict[str, Any] | None = None,
) -> Path:
    """Write a folder in sentence-transformers' form.

    dense: output size of a dense layer.
    """
    plain(path, family)
    kinds = [
        "Transformer",
        "Pooling",
        *(["Dense"] if dense else []),
        *(["Normalize"] if normalize else []),
    ]
    folders = ["", *(f"{index}_{kind}" for index, kind in enumerate(kinds) if index)]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": folder,
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, (kind, folder) in enumerate(zip(kinds, folders, strict=True))
    ]
    _write(path / "modules.json", modules)
    _write(
        path / "1_Pooling/config.json",
        pooling or {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True},
    )
    texts = {
        "prompts": prompts or {},
        "default_prompt_name": default_prompt,
        "similarity_fn_name": "cosine",
    }
    _write(path / "config_sentence_transformers.json", texts)
    _write(
        path / "sentence_bert_config.json",
        settings or {"max_seq_length": LONGEST, "do_lower_case": False},
    )
    if dense:
        torch.manual_seed(1)
        tanh = "torch.nn.modules.activation.Tanh"
        said = {"in_features": 32, "out_features": dense, "bias": True, "activation_function": tanh}
        _write(path / "2_Dense/config.json", said)
        weights = {"linear.weight": torch.randn(dense, 32) / 6, "linear.bias": torch.randn(dense)}
        save_file(weights, path / "2_Dense/model.safetensors")
    return path


def _write(path: Path, said: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(said))


def reference(path: Path, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Return `[tokens, hidden]` of each text, by transformers' forward pass of it alone."""
    config = json.loads((path / "config.json").read_text())
    kind = AutoModelForTextEncoding if config["model_type"] == "t5" else AutoModel
    model = kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return [model(input_ids=torch.tensor([list(text)])).last_hidden_state[0] for text in texts]


def means(path: Path, texts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return `[texts, hidden]`: unit-length means of the reference."""
    return functional.normalize(
        torch.stack([tokens.mean(dim=0) for tokens in reference(path, texts)])
    )


def ids(count: int, seed: int = 0) -> list[int]:
    """Return the ids of a made-up text of `count` tokens without special ones inside."""
    generator = torch.Generator().manual_seed(1000 * seed + count)
    return [0, *torch.randint(4, 90, (count - 2,), generator=generator).tolist(), 2]


def clip(path: Path, family: str = "clip") -> Path:
    """Write a folder of CLIP or SigLIP in transformers' form: two towers and two processors.

    With 2 as its end, CLIP reads the token of the largest id, as in OpenAI's checkpoints.
    """
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 24,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    vision = {name: text[name] for name in ("hidden_size", "intermediate_size")} | {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 8,
    }
    torch.manual_seed(5)
    if family == "clip":
        model: Any = CLIPModel(
            CLIPConfig(
                text_config=text | {"projection_dim": 16}, vision_config=vision, projection_dim=16
            )
        )
        processor: Any = CLIPImageProcessorPil(
            size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
        )
    else:
        sizes = text | {"projection_size": 32}
        model = SiglipModel(SiglipConfig(text_config=sizes, vision_config=vision))
        processor = SiglipImageProcessorPil(size={"height": 32, "width": 32})
    with torch.no_grad():
        for name, parameter in model.eval().named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.5 if "embed" in name else 0.2)
    model.save_pretrained(path)
    made = tokenizer()
    made.model_max_length = 24
    made.save_pretrained(path)
    processor.save_pretrained(path)
    return path
