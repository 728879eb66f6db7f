"""Write tiny checkpoints of Qwen2.5-Omni, whole: thinker, talker, code2wav and voices."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    PreTrainedConfig,
    Qwen2_5OmniConfig,
    Qwen2_5OmniForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    WhisperFeatureExtractor,
)

from motet_encoder.processors import processor_class
from support.checkpoints.language_checkpoints import EOS, VOCAB, write_tokenizer
from support.families import hearing, processed_vlms

MARKS = dict(hearing.FAMILIES["qwen2_5_omni_thinker"].marks)
SPEECH = ("<|tts_pad|>", "<|tts_bos|>", "<|tts_eos|>")
IDS = {
    mark: VOCAB + number for number, mark in enumerate([*dict.fromkeys(MARKS.values()), *SPEECH])
}
CODES = 40  # of code2wav; those behind them are the talker's own
CODE_PAD, CODE_BOS, CODE_EOS, CODE_MASK = CODES, CODES + 1, CODES + 2, CODES + 4
TIE = 1e-4  # between scores
VOICES = ("Chelsie", "Ethan")
BLOCK = 4  # frames
_MEL, _SPEAKER = 8, 16
_PIXELS = {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 24}, "patch_size": 14}
_MEDIA = {
    "image": "<|vision_bos|><|IMAGE|><|vision_eos|>",
    "audio": "<|audio_bos|><|AUDIO|><|audio_eos|>",
}


def write(path: Path, *, seed: int = 0) -> Qwen2_5OmniForConditionalGeneration:
    """Write a checkpoint into `path`; return its model."""
    torch.manual_seed(seed)
    model = Qwen2_5OmniForConditionalGeneration(_config()).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("token2wav"):
                continue
            if parameter.ndim > 1:
                parameter.normal_(std=0.5 if "embed" in name else 0.15)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    write_tokenizer(path)
    processed_vlms.add_marks(path, IDS, {mark: mark for mark in IDS} | MARKS, _MEDIA)
    write_processor(path, model.config)
    torch.save(
        {
            name: {
                "bos_token": IDS["<|tts_bos|>"],
                "cond": torch.randn(1, _SPEAKER),
                "ref_mel": torch.randn(1, 10 + number, _MEL),
            }
            for number, name in enumerate(VOICES)
        },
        path / "spk_dict.pt",
    )
    model.load_speakers(path / "spk_dict.pt")
    return model


def _config() -> Qwen2_5OmniConfig:
    family = hearing.FAMILIES["qwen2_5_omni_thinker"]
    thinker = processed_vlms.config_of("qwen2_5_omni_thinker", family, IDS)
    thinker.text_config.vocab_size = VOCAB + len(IDS)
    thinker.text_config.eos_token_id = EOS
    shared = (
        "audio_token_index image_token_index video_token_index audio_start_token_id"
        " audio_end_token_id"
    )
    talker: dict[str, Any] = {
        **{name: getattr(thinker, name) for name in shared.split()},
        "vision_start_token_id": IDS["<|vision_bos|>"],
        "vision_end_token_id": IDS["<|vision_eos|>"],
        "vocab_size": CODES + 8,
        "embedding_size": thinker.text_config.hidden_size,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_parameters": family.text["rope_parameters"],
        "tts_text_start_token_id": IDS["<|tts_bos|>"],
        "tts_text_end_token_id": IDS["<|tts_eos|>"],
        "tts_text_pad_token_id": IDS["<|tts_pad|>"],
        "tts_codec_pad_token_id": CODE_PAD,
        "tts_codec_start_token_id": CODE_BOS,
        "tts_codec_end_token_id": CODE_EOS,
        "tts_codec_mask_token_id": CODE_MASK,
    }
    dit = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "head_dim": 16,
        "emb_dim": 16,
        "block_size": BLOCK,
        "look_ahead_layers": [1],
        "look_backward_layers": [0, 2],
        "repeats": 2,
        "num_embeds": CODES + 8,
        "mel_dim": _MEL,
        "enc_emb_dim": _SPEAKER,
        "enc_dim": 16,
        "enc_channels": [16, 16, 16, 16, 48],
        "enc_attention_channels": 8,
        "enc_se_channels": 8,
        "enc_res2net_scale": 2,
    }
    vocoder = {
        "mel_dim": _MEL,
        "upsample_initial_channel": 32,
        "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 3, 5]],
        "upsample_rates": [4, 3],
        "upsample_kernel_sizes": [8, 7],
    }
    return Qwen2_5OmniConfig(
        thinker_config=thinker.to_dict(),
        talker_config=talker,
        token2wav_config={"dit_config": dit, "bigvgan_config": vocoder},
    )


def write_processor(path: Path, config: PreTrainedConfig) -> None:
    """Write the processor of an omni checkpoint, for pictures and sound, beside its tokenizer."""
    kind, settings = hearing.WHISPER
    assert kind == WhisperFeatureExtractor.__name__
    processor = processor_class(config)(
        tokenizer=AutoTokenizer.from_pretrained(path),
        image_processor=Qwen2VLImageProcessorPil(**_PIXELS),
        feature_extractor=WhisperFeatureExtractor(**settings),
        video_processor=None,
    )
    processed_vlms.save_processor(processor, path)


@torch.inference_mode()
def generated(
    model: Any, inputs: dict[str, torch.Tensor], tokens: int, codes: int
) -> tuple[list[int], list[int], list[set[int]]]:
    """Return so many tokens, and the codes up to their end, of a greedy `generate`.

    Also, for each code, those that tie with it.
    """
    # Its own talker refuses what it is given of pictures, but their sizes.
    pixels = ("pixel_values", "pixel_values_videos")
    given = {f"thinker_{k}" if k in pixels else k: v for k, v in inputs.items()}
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    found: list[int] = []

    def heard(made: torch.Tensor, **_: Any) -> torch.Tensor:
        found.extend(made[0].tolist())
        return torch.zeros(1)

    prepare, speak = model.talker.prepare_inputs_for_generation, model.talker.generate
    ties: list[set[int]] = []

    def spoken(**options: Any) -> torch.Tensor:
        made = speak(**options, return_dict_in_generate=True, output_scores=True)
        for (scores_V,) in made.scores:
            ties.append(set((scores_V > scores_V.max() - TIE).nonzero().flatten().tolist()))
        sequences: torch.Tensor = made.sequences
        return sequences

    @functools.wraps(prepare)
    def with_mask(input_ids: torch.Tensor, *args: Any, **options: Any) -> dict[str, Any]:
        made: dict[str, Any] = prepare(input_ids, *args, **options)
        return made | {"attention_mask": torch.ones_like(input_ids)}

    # `generate` drops a mask of ones. Only with a mask, as in batches of unequal lengths, does the
    # talker add the codes that begin speech, and take the positions of pictures.
    model.talker.prepare_inputs_for_generation, model.talker.generate = with_mask, spoken
    own, model.token2wav.forward = model.token2wav.forward, heard
    try:
        sequences, _ = model.generate(
            **given,
            thinker_do_sample=False,
            thinker_max_new_tokens=tokens,
            thinker_eos_token_id=1 << 20,
            talker_do_sample=False,
            talker_max_new_tokens=codes,
            talker_eos_token_id=[CODE_PAD, CODE_EOS],
        )
    finally:
        model.token2wav.forward = own
        model.talker.prepare_inputs_for_generation, model.talker.generate = prepare, speak
    return sequences[0, inputs["input_ids"].shape[1] :].tolist(), found, ties
