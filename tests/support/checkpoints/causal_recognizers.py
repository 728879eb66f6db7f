"""Write tiny checkpoints of recognizers that are decoder-only: Qwen3-ASR, Kyutai STT and Voxtral."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    KyutaiSpeechToTextConfig,
    KyutaiSpeechToTextFeatureExtractor,
    PreTrainedTokenizerFast,
    Qwen3ASRConfig,
    Qwen3ASRFeatureExtractor,
    VoxtralConfig,
    VoxtralRealtimeConfig,
    VoxtralRealtimeFeatureExtractor,
    WhisperFeatureExtractor,
)

from support.checkpoints.asr_checkpoints import letters, spread
from support.checkpoints.tekken import (
    AUDIO,
    INSTRUCT,
    STREAMING,
    VOCABULARY,
    write_tekken_with_sound,
)

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
_QWEN_MARKS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
)
_QWEN_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% for part in message.content %}{% if part.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>\
{% else %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>
{% endfor -%}"""


def tiny_qwen3_asr(path: Path) -> Path:
    """Write a Qwen3-ASR whose tokens are bytes; it ends some of its answers."""
    tokenizer = _bytes_tokenizer()
    ids = {mark: tokenizer.convert_tokens_to_ids(mark) for mark in _QWEN_MARKS}
    config = Qwen3ASRConfig(
        audio_config={
            "num_mel_bins": 128,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 48,
            "d_model": 32,
            "n_window": 50,
            "n_window_infer": 100,
            "output_dim": 32,
            "downsample_hidden_size": 8,
        },
        text_config={**TEXT, "model_type": "qwen3", "vocab_size": len(tokenizer)},
        audio_token_id=ids["<|audio_pad|>"],
        pad_token_id=ids["<|im_end|>"],
        eos_token_id=[ids["<|endoftext|>"], ids["<|im_end|>"]],
    )
    model = _spread(transformers.Qwen3ASRForConditionalGeneration(config), 3, ids["<|im_end|>"])
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.pad_token_id = config.pad_token_id
    model.save_pretrained(path)
    Qwen3ASRFeatureExtractor().save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def _bytes_tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # it has another order in each process
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={
            "audio_token": "<|audio_pad|>",
            "audio_bos_token": "<|audio_start|>",
            "audio_eos_token": "<|audio_end|>",
        },
        chat_template=_QWEN_TEMPLATE,
    )
    fast.add_tokens(["<|im_start|>"], special_tokens=True)
    fast.add_tokens(["<asr_text>"])
    return fast


def _spread(model: Any, seed: int, end: int | None = None) -> Any:
    """Spread weights so that answers vary; those of the `end` token make it likely."""
    spread(model, seed)
    with torch.no_grad():
        model.get_input_embeddings().weight.normal_(std=0.4)
        if model.lm_head.weight is not model.get_input_embeddings().weight:
            model.lm_head.weight.normal_(std=0.4)
        if end is not None:
            model.lm_head.weight[end] *= 2.5
    return model


def tiny_kyutai(path: Path, **options: Any) -> Path:
    """Write a Kyutai STT with four codebooks, whose text is two frames behind the audio."""
    codec = {
        "model_type": "mimi",
        "hidden_size": 32,
        "num_filters": 4,
        "num_quantizers": 4,
        "num_semantic_quantizers": 1,
        "codebook_size": 16,
        "codebook_dim": 8,
        "vector_quantization_hidden_dimension": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "intermediate_size": 48,
        "sliding_window": 6,
        "upsample_groups": 32,
    }
    config = KyutaiSpeechToTextConfig(
        **TEXT,
        vocab_size=64,
        codebook_vocab_size=17,
        num_codebooks=4,
        ffn_dim=48,
        audio_bos_token_id=16,
        audio_pad_token_id=64 + 4 * 17,
        bos_token_id=1,
        pad_token_id=3,
        sliding_window=8,
        codec_config=codec,
        **options,
    )
    torch.manual_seed(0)
    model = transformers.KyutaiSpeechToTextForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "codec" not in name:
                parameter.normal_(std=0.4)
        for name, buffer in model.codec_model.named_buffers():
            if "embed_sum" in name:
                buffer.normal_(std=0.3)
    model.eval().save_pretrained(path)
    KyutaiSpeechToTextFeatureExtractor(
        audio_delay_seconds=0.16, audio_silence_prefix_seconds=0.08
    ).save_pretrained(path)
    letters(path, PreTrainedTokenizerFast, ["<unk>", "<s>", "</s>", "<pad>"])
    return path


def tiny_voxtral(path: Path) -> Path:
    """Write a Voxtral with Mistral's own vocabulary format."""
    config = VoxtralConfig(
        audio_config={
            "hidden_size": 32,
            "intermediate_size": 32 * 4 * 5,
            "num_mel_bins": 16,
            "max_source_positions": 1500,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "head_dim": 16,
        },
        text_config={**TEXT, "model_type": "llama", "vocab_size": VOCABULARY},
        audio_token_id=AUDIO,
    )
    model = _spread(transformers.VoxtralForConditionalGeneration(config), 0, end=2)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(path)
    WhisperFeatureExtractor(feature_size=16).save_pretrained(path)
    write_tekken_with_sound(path, {**INSTRUCT, "frame_rate": 2.5}, "v11")
    return path


def tiny_voxtral_realtime(path: Path) -> Path:
    """Write a Voxtral-realtime that forgets what is 40 frames ago, and hears 24 positions back."""
    tower = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_mel_bins": 16,
        "head_dim": 16,
        "sliding_window": 24,
    }
    text = {**TEXT, "vocab_size": VOCABULARY, "sliding_window": 40, "tie_word_embeddings": True}
    config = VoxtralRealtimeConfig(
        audio_config=tower, text_config={**text, "model_type": "voxtral_realtime_text"}
    )
    model = _spread(transformers.VoxtralRealtimeForConditionalGeneration(config), 0)
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 11
    model.save_pretrained(path)
    VoxtralRealtimeFeatureExtractor(feature_size=16).save_pretrained(path)
    write_tekken_with_sound(path, STREAMING, "v13")
    return path
