"""Write tiny vision-language checkpoints of every supported family, as transformers does.

Each has a byte-level tokenizer with the family's special tokens, a chat template and image
processor settings. Weights spread widely, so that the picture changes the answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from transformers import PreTrainedConfig, PreTrainedModel

from support.checkpoints.language_checkpoints import EOS, VOCAB, write_tokenizer

HIDDEN = 32
CONTEXT = 512

_TEXT: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": VOCAB - 3,
}
_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}

# What the content of a message becomes; `mark` stands where an image is.
_PARTS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}MARK{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# LLaVA's own manner: images first, and nothing at all of a content that is a string.
_IMAGES_FIRST = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content | selectattr('type', 'equalto', 'image') %}MARK\n{% endfor %}"
    "{% for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_QWEN_MARK = "<|vision_start|><|image_pad|><|vision_end|>"


@dataclass(frozen=True)
class Family:
    """Define a tiny checkpoint of a family.

    marks: its special tokens; the first one is the image placeholder.
    """

    model: str
    marks: tuple[str, ...]
    processor: tuple[str, dict[str, Any]]
    config: Callable[[dict[str, int]], PreTrainedConfig]
    template: str = _PARTS
    mark: str = "<image>"
    specials: dict[str, str] = field(default_factory=dict)


def _llava(tower: dict[str, Any], **options: Any) -> Callable[[dict[str, int]], PreTrainedConfig]:
    def config(ids: dict[str, int]) -> PreTrainedConfig:
        text = {"model_type": "llama", **_TEXT, "vocab_size": VOCAB + len(ids)}
        vision = {"image_size": 42, "patch_size": 14, **_TOWER, **tower}
        return transformers.LlavaConfig(
            vision_config=vision,
            text_config=text,
            image_token_index=ids["<image>"],
            image_seq_length=9,
            **options,
        )

    return config


def _qwen(
    name: str, vision: dict[str, Any], **text: Any
) -> Callable[[dict[str, int]], PreTrainedConfig]:
    def config(ids: dict[str, int]) -> PreTrainedConfig:
        words = {**_TEXT, "vocab_size": VOCAB + len(ids), "rope_parameters": _MROPE, **text}
        sizes = {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": HIDDEN,
        }
        return getattr(transformers, name)(
            text_config=words,
            vision_config={**sizes, **vision},
            image_token_id=ids["<|image_pad|>"],
            video_token_id=ids["<|video_pad|>"],
            vision_start_token_id=ids["<|vision_start|>"],
            vision_end_token_id=ids["<|vision_end|>"],
            tie_word_embeddings=True,
        )

    return config


def _tiles(name: str) -> Callable[[dict[str, int]], PreTrainedConfig]:
    def config(ids: dict[str, int]) -> PreTrainedConfig:
        text = {"model_type": "llama", **_TEXT, "vocab_size": VOCAB + len(ids)}
        vision = {"image_size": 32, "patch_size": 8, **_TOWER}
        return getattr(transformers, name)(
            text_config=text, vision_config=vision, image_token_id=ids["<image>"], scale_factor=2
        )

    return config


_CLIP_SIZES = {"size": {"shortest_edge": 42}, "crop_size": {"height": 42, "width": 42}}
_QWEN_MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
_PLACES = tuple(f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5))
_TILE_MARKS = (
    "<image>",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *_PLACES,
)
_TILE_SIZES = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
_PIXELS = {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 24}

FAMILIES: dict[str, Family] = {
    "llava_clip": Family(
        "LlavaForConditionalGeneration",
        ("<image>",),
        ("CLIPImageProcessorPil", _CLIP_SIZES),
        _llava({"model_type": "clip_vision_model"}),
        _IMAGES_FIRST,
    ),
    "llava_siglip": Family(
        "LlavaForConditionalGeneration",
        ("<image>",),
        ("SiglipImageProcessorPil", {"size": {"height": 42, "width": 42}}),
        _llava(
            {"model_type": "siglip_vision_model"},
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
        ),
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VLForConditionalGeneration",
        _QWEN_MARKS,
        ("Qwen2VLImageProcessorPil", {"patch_size": 14, "size": _PIXELS}),
        _qwen("Qwen2_5_VLConfig", {"window_size": 56, "fullatt_block_indexes": [1]}),
        mark=_QWEN_MARK,
    ),
    "qwen3_vl": Family(
        "Qwen3VLForConditionalGeneration",
        _QWEN_MARKS,
        ("Qwen2VLImageProcessorPil", {"patch_size": 14, "size": _PIXELS}),
        _qwen(
            "Qwen3VLConfig",
            {
                "depth": 3,
                "patch_size": 14,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 1],
            },
            head_dim=8,
        ),
        mark=_QWEN_MARK,
    ),
    "smolvlm": Family(
        "SmolVLMForConditionalGeneration",
        _TILE_MARKS,
        ("SmolVLMImageProcessorPil", _TILE_SIZES),
        _tiles("SmolVLMConfig"),
    ),
    "idefics3": Family(
        "Idefics3ForConditionalGeneration",
        _TILE_MARKS,
        ("Idefics3ImageProcessorPil", _TILE_SIZES),
        _tiles("Idefics3Config"),
    ),
}


def tiny_vlm(family: str, path: Path, *, seed: int = 0) -> Path:
    """Write a checkpoint of `family` (a key of FAMILIES) into `path`."""
    made = FAMILIES[family]
    ids = {mark: VOCAB + number for number, mark in enumerate(made.marks)}
    config = made.config(ids)
    torch.manual_seed(seed)
    model = getattr(transformers, made.model)(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.5 if "embed" in name else 0.2)
    model.save_pretrained(path)
    kind, settings = made.processor
    getattr(transformers, kind)(**settings).save_pretrained(path)
    write_tokenizer(path)
    _add_marks(path, ids, made.template.replace("MARK", made.mark))
    return path


def reference(path: Path) -> PreTrainedModel:
    """Load a folder of `tiny_vlm` with transformers."""
    return transformers.AutoModelForImageTextToText.from_pretrained(
        path, dtype=torch.float32
    ).eval()


def picture(seed: int, width: int = 60, height: int = 50) -> Image.Image:
    """Return a picture of random blots, so that every resolution shows something."""
    noise = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def _add_marks(path: Path, ids: dict[str, int], template: str) -> None:
    file, settings = path / "tokenizer.json", path / "tokenizer_config.json"
    tokenizer, config = json.loads(file.read_text()), json.loads(settings.read_text())
    like = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        {**like, "id": number, "content": mark} for mark, number in ids.items()
    ]
    file.write_text(json.dumps(tokenizer))
    settings.write_text(json.dumps({**config, "chat_template": template}))
