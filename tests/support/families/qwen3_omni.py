"""Write tiny checkpoints of Qwen3-Omni, whole: thinker, talker with its code predictor, code2wav."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
)

from support.checkpoints.language_checkpoints import EOS, SPECIAL, VOCAB, write_tokenizer
from support.families import hearing, processed_vlms
from support.families.omni import write_processor

MARKS = dict(hearing.FAMILIES["qwen3_omni_moe_thinker"].marks)
SPEECH = ("<|tts_pad|>", "<|tts_bos|>", "<|tts_eos|>")
ROLES = ("system", "user", "assistant")  # one token each, as in the released checkpoints
IDS = {
    mark: VOCAB + number
    for number, mark in enumerate([*dict.fromkeys(MARKS.values()), *SPEECH, *ROLES])
}
START = 256 + SPECIAL.index("<|im_start|>")
GROUPS = 4  # codes of a frame
CODES = 40  # of each group; those behind them are the talker's own
RESERVED = 1024  # of the talker's last codes, which only its end is drawn from
CODE = {
    name: CODES + number
    for number, name in enumerate("eos pad bos nothink think_bos think_eos chelsie ethan".split())
}
VOICES = ("chelsie", "ethan")
MEDIA = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
}


def write(
    path: Path, *, seed: int = 0, endless: bool = False, context: int = 512
) -> Qwen3OmniMoeForConditionalGeneration:
    """Write a checkpoint into `path`; return its model.

    endless: its text seldom ends by itself. context: of the talker, which bounds its sound.
    """
    torch.manual_seed(seed)
    model = Qwen3OmniMoeForConditionalGeneration(_config(context)).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("code2wav"):
                _spread_sound(name, parameter)
            elif parameter.ndim > 1:
                parameter.normal_(std=0.5 if "embed" in name else 0.15)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        if endless:
            model.thinker.lm_head.weight[EOS] = 0.0
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    write_tokenizer(path)
    processed_vlms.add_marks(path, IDS, {mark: mark for mark in IDS} | MARKS, MEDIA)
    write_processor(path, model.config)
    return model


def _spread_sound(name: str, parameter: torch.Tensor) -> None:
    """Spread code2wav's weights so that its samples vary, and seldom reach the limits."""
    if name.endswith(("gamma", "scale")):
        parameter.fill_(0.5)
    elif "embedding" in name:
        parameter.normal_(std=1.0)
    elif name.startswith("code2wav.decoder.4"):  # the last convolution
        parameter.normal_(std=0.012)
    elif parameter.ndim > 1:
        parameter.normal_(std=0.12)
    else:
        parameter.add_(torch.randn_like(parameter), alpha=0.1)


def _config(context: int = 512) -> Qwen3OmniMoeConfig:
    family = hearing.FAMILIES["qwen3_omni_moe_thinker"]
    thinker = processed_vlms.config_of("qwen3_omni_moe_thinker", family, IDS)
    thinker.text_config.vocab_size = VOCAB + len(IDS)
    thinker.text_config.eos_token_id = EOS
    thinker.user_token_id = IDS["user"]
    shared = "audio_token_id image_token_id video_token_id audio_start_token_id"
    decoder = {
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": context,
    }
    talker: dict[str, Any] = {
        **{name: getattr(thinker, name) for name in shared.split()},
        "vision_start_token_id": IDS["<|vision_start|>"],
        "spatial_merge_size": 2,
        "num_code_groups": GROUPS,
        "thinker_hidden_size": thinker.text_config.hidden_size,
        "accept_hidden_layer": 2,
        "codec_eos_token_id": CODE["eos"],
        **{f"codec_{n}_id": CODE[n] for n in ("pad", "bos", "nothink", "think_bos", "think_eos")},
        "speaker_id": {name: CODE[name] for name in VOICES},
        "text_config": {
            **decoder,
            "vocab_size": CODES + RESERVED,
            "rope_parameters": family.text["rope_parameters"],
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        "code_predictor_config": {
            **decoder,
            "vocab_size": CODES,
            "num_code_groups": GROUPS,
        },
    }
    code2wav = {
        "codebook_size": CODES,
        "num_quantizers": GROUPS,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "sliding_window": 6,
        "decoder_dim": 32,
        "upsample_rates": [4, 3],
        "upsampling_ratios": [2],
    }
    return Qwen3OmniMoeConfig(
        thinker_config=thinker.to_dict(),
        talker_config=talker,
        code2wav_config=code2wav,
        im_start_token_id=START,
        im_end_token_id=EOS,
        tts_pad_token_id=IDS["<|tts_pad|>"],
        tts_bos_token_id=IDS["<|tts_bos|>"],
        tts_eos_token_id=IDS["<|tts_eos|>"],
        system_token_id=IDS["system"],
        user_token_id=IDS["user"],
        assistant_token_id=IDS["assistant"],
    )


@torch.inference_mode()
def generated(
    model: Any, inputs: dict[str, torch.Tensor], tokens: int, codes: int, voice: str = "ethan"
) -> tuple[list[int], list[list[int]]]:
    """Return so many tokens, and the frames `[N, GROUPS]` of codes, of a greedy `generate`.

    It gives one frame less than `codes`, as it computes the rest of a frame with the next one.
    """
    given = {"attention_mask": torch.ones_like(inputs["input_ids"]), **inputs}
    found: list[list[int]] = []

    def heard(made: torch.Tensor, **_: Any) -> torch.Tensor:
        found.extend(made[0].T.tolist())
        return torch.zeros(1)

    # Its talker asks for this where a prompt has pictures and sound, and has none in its config.
    model.talker.config.audio_config = model.config.thinker_config.audio_config
    own, model.code2wav.chunked_decode = model.code2wav.chunked_decode, heard
    try:
        with warnings.catch_warnings():
            # the penalty of its talker applies to codes, as it should
            warnings.filterwarnings("ignore", "Passing `repetition_penalty`", UserWarning)
            sequences, _ = model.generate(
                **given,
                speaker=voice,
                thinker_do_sample=False,
                thinker_max_new_tokens=tokens,
                thinker_eos_token_id=1 << 20,
                talker_do_sample=False,
                talker_max_new_tokens=codes,
            )
    finally:
        model.code2wav.chunked_decode = own
    return sequences[0, inputs["input_ids"].shape[1] :].tolist(), found
