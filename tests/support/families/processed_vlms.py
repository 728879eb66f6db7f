"""Write tiny vision-language checkpoints with the processors of transformers' own classes.

A family is a line: its special tokens by their roles in the tokenizer, its image processor, and
what its config needs besides the small sizes of `composites`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.processing_utils import MODALITY_TO_AUTOPROCESSOR_MAPPING

from motet_encoder.processors import processor_class
from motet_models.processors import without_videos
from support.checkpoints.language_checkpoints import VOCAB, write_tokenizer
from support.families import composites

Options = dict[str, Any]
# Marks of media stand where their parts are.
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ part.text if part.type == 'text' else MEDIA[part.type] }}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """Define a tiny checkpoint.

    marks: its special tokens by role; "image_token" is the placeholder.
    ids: fields of the config that hold the id of a mark, by role.
    parts: the processor's parts besides the tokenizer: class and settings.
    text, tower, audio, config: fields of the parts of the config.
    budget: tokens of a step.
    """

    parts: dict[str, tuple[str, Options]]
    marks: dict[str, str]
    ids: dict[str, str] = field(default_factory=dict)
    text: Options = field(default_factory=dict)
    tower: Options = field(default_factory=dict)
    audio: Options = field(default_factory=dict)
    config: Options = field(default_factory=dict)
    processor: Options = field(default_factory=dict)
    budget: int = 7


_SQUARE = {"size": {"height": 28, "width": 28}}
_IMAGE = {"image_token": "<image>"}
_CLIP = {
    "model_type": "clip_vision_model",
    "image_size": 28,
    "patch_size": 14,
    "num_hidden_layers": 3,
}
_SIGLIP = {**_CLIP, "model_type": "siglip_vision_model"}
_TILED = {
    "size": {"height": 28, "width": 28},
    "crop_size": {"height": 28, "width": 28},
    "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]],
}
_LLAVA_PROCESSOR = {"patch_size": 14, "vision_feature_select_strategy": "default"}
_QWEN_MARKS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}
_QWEN_IDS = {
    "image_token_id": "image_token",
    "video_token_id": "video_token",
    "vision_start_token_id": "vision_start_token",
    "vision_end_token_id": "vision_end_token",
}
_QWEN_PIXELS = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 24}, "patch_size": 14}

_QWEN3_5 = Family(
    {"image_processor": ("Qwen2VLImageProcessorPil", _QWEN_PIXELS)},
    _QWEN_MARKS,
    _QWEN_IDS,
    tower={"patch_size": 14, "num_position_embeddings": 64},
)
FAMILIES: dict[str, Family] = {
    "gemma3": Family(
        {"image_processor": ("Gemma3ImageProcessorPil", _SQUARE)},
        {
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        {
            "image_token_id": "image_token",
            "boi_token_index": "boi_token",
            "eoi_token_index": "eoi_token",
        },
        tower={"image_size": 28, "patch_size": 7, "model_type": "siglip_vision_model"},
        config={"mm_tokens_per_image": 4},
        processor={"image_seq_length": 4},
    ),
    "internvl": Family(
        {"image_processor": ("GotOcr2ImageProcessorPil", {**_SQUARE, "max_patches": 6})},
        {
            "image_token": "<IMG_CONTEXT>",
            "context_image_token": "<IMG_CONTEXT>",
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "video_token": "<video>",
        },
        {"image_token_id": "image_token"},
        tower={"image_size": [28, 28], "patch_size": [7, 7], "num_attention_heads": 2},
        config={"image_seq_length": 4},
        processor={"image_seq_length": 4},
    ),
    "mistral3": Family(
        {
            "image_processor": (
                "PixtralImageProcessorPil",
                {"size": {"longest_edge": 84}, "patch_size": 14},
            )
        },
        {
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        },
        {"image_token_id": "image_token"},
        tower={"image_size": 84, "patch_size": 14, "head_dim": 16},
        config={"spatial_merge_size": 2},
        processor={"patch_size": 14, "spatial_merge_size": 2},
    ),
    "llava_next": Family(
        {"image_processor": ("LlavaNextImageProcessorPil", _TILED)},
        _IMAGE,
        {"image_token_id": "image_token"},
        tower=_CLIP,
        config={"image_grid_pinpoints": _TILED["image_grid_pinpoints"]},
        processor=_LLAVA_PROCESSOR | {"num_additional_image_tokens": 1},
    ),
    "qwen2_vl": Family(
        {"image_processor": ("Qwen2VLImageProcessorPil", _QWEN_PIXELS)},
        _QWEN_MARKS,
        _QWEN_IDS,
        tower={"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2, "patch_size": 14},
    ),
    "qwen3_vl_moe": Family(
        {"image_processor": ("Qwen2VLImageProcessorPil", _QWEN_PIXELS)},
        _QWEN_MARKS,
        _QWEN_IDS,
        tower={
            "depth": 3,
            "patch_size": 14,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    ),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "glm4v": Family(
        {"image_processor": ("Glm4vImageProcessorPil", {**_QWEN_PIXELS})},
        {
            "image_token": "<|image|>",
            "video_token": "<|video|>",
            "image_start_token": "<|begin_of_image|>",
            "image_end_token": "<|end_of_image|>",
        },
        {
            "image_token_id": "image_token",
            "video_token_id": "video_token",
            "image_start_token_id": "image_start_token",
            "image_end_token_id": "image_end_token",
        },
        tower={"patch_size": 14, "out_hidden_size": 64, "image_size": 56},
    ),
    "vipllava": Family(
        {
            "image_processor": (
                "CLIPImageProcessorPil",
                {"size": {"shortest_edge": 28}, "crop_size": _SQUARE["size"]},
            )
        },
        _IMAGE,
        {"image_token_id": "image_token"},
        tower={**_CLIP, "num_hidden_layers": 12},
        config={"vision_feature_layers": [-2, -5, -8, -11, 6]},
        processor=_LLAVA_PROCESSOR | {"num_additional_image_tokens": 1},
    ),
}


def write(name: str, path: Path, *, seed: int = 0) -> PreTrainedModel:
    """Write a checkpoint of a family (a key of FAMILIES) into `path`; return its model."""
    return write_family(name, FAMILIES[name], path, seed=seed)


def write_family(name: str, family: Family, path: Path, *, seed: int = 0) -> PreTrainedModel:
    """Write a checkpoint with what `family` defines, of the class whose `model_type` is `name`."""
    path.mkdir(parents=True, exist_ok=True)
    spelled = list(dict.fromkeys(family.marks.values()))
    ids = {mark: VOCAB + number for number, mark in enumerate(spelled)}
    config = config_of(name, family, ids)
    model = composites.random_weights(config, seed=seed)
    model.save_pretrained(path)
    write_tokenizer(path)
    add_marks(path, ids, family.marks)
    found = _processor_class(config)
    parts = {
        "tokenizer": AutoTokenizer.from_pretrained(path),
        **{
            part: getattr(transformers, kind)(**settings)
            for part, (kind, settings) in family.parts.items()
        },
    }
    missing = {part: None for part in found.get_attributes() if part not in parts}
    processor = found(**parts, **missing, **family.processor)
    save_processor(processor, path)
    return model


def reference_processor(path: Path) -> Any:
    """Return transformers' own processor of a folder that `write` wrote, without videos."""
    found = _processor_class(AutoConfig.from_pretrained(path))
    return found.from_pretrained(path, local_files_only=True)


def _processor_class(config: PreTrainedConfig) -> Any:
    if config.model_type != "mistral3":
        return processor_class(config)
    # The module of Pixtral's processor imports a function by way of torchvision.
    folder = "transformers.models.pixtral"
    sys.modules[f"{folder}.image_processing_pixtral"] = import_module(
        f"{folder}.image_processing_pil_pixtral"
    )
    whole = import_module(f"{folder}.processing_pixtral").PixtralProcessor
    return without_videos(whole, MODALITY_TO_AUTOPROCESSOR_MAPPING)


def save_processor(processor: Any, path: Path) -> None:
    """Write a processor's settings, without those of its tokenizer."""
    settings: dict[str, Any] = {}
    for part in ("image_processor", "feature_extractor", "audio_processor"):
        if hasattr(processor, part):
            settings |= json.loads(getattr(processor, part).to_json_string())
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    fields = {
        name: value
        for name, value in processor.to_dict().items()
        if isinstance(value, int | str | bool | float)
    }
    (path / "processor_config.json").write_text(json.dumps(fields))


def config_of(name: str, family: Family, ids: dict[str, int]) -> Any:
    """Return the tiny config of a family, with the ids of its marks."""
    config_class, model_class = composites.composite_classes()[name]
    text = composites.TEXT.get(name, {}) | {"vocab_size": VOCAB + len(ids)} | family.text
    numbers = {field: ids[family.marks[role]] for field, role in family.ids.items()}
    config = composites.tiny_config(
        config_class,
        text,
        tower=family.tower,
        audio=family.audio,
        outer={**numbers, **family.config},
    )
    config.architectures = [model_class.__name__]
    return config


def add_marks(
    path: Path, ids: dict[str, int], marks: dict[str, str], media: dict[str, str] | None = None
) -> None:
    """Add special tokens to a tokenizer, and a template that writes those of media.

    media: what it writes for a picture and for a recording; by default the marks alone.
    """
    file, settings = path / "tokenizer.json", path / "tokenizer_config.json"
    tokenizer, config = json.loads(file.read_text()), json.loads(settings.read_text())
    like = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        {**like, "id": number, "content": mark} for mark, number in ids.items()
    ]
    file.write_text(json.dumps(tokenizer))
    media = media or {
        "image": marks.get("boi_token", marks.get("image_token", "")),
        "audio": marks.get("audio_token", ""),
    }
    template = _TEMPLATE.replace("MEDIA", json.dumps(media))
    more = {"extra_special_tokens": marks, "chat_template": template}
    settings.write_text(json.dumps({**config, **more}))
