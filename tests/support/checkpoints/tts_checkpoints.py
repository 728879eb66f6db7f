"""Write tiny speech synthesis checkpoints with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    CsmConfig,
    CsmForConditionalGeneration,
    PocketTTSAudioTokenizerConfig,
    PocketTTSAudioTokenizerModel,
    PocketTTSConfig,
    PocketTTSForConditionalGeneration,
    VitsConfig,
    VitsModel,
)

from support.checkpoints.language_checkpoints import VOCAB, write_tokenizer

_MIMI: dict[str, Any] = {
    "hidden_size": 16,
    "num_filters": 4,
    "upsampling_ratios": [4, 3, 2],
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "sliding_window": 6,  # shorter than any sentence, so that the window matters
    "upsample_groups": 16,
    "sampling_rate": 24_000,
}
_DECODER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
BOOKS, CODES = 4, 32
VOICES = ("anna", "ben")


def csm(path: Path, *, seed: int = 0, sample: bool = False) -> Path:
    """Write a CSM with four codebooks of 32 codes."""
    torch.manual_seed(seed)
    codec = {
        **_MIMI,
        "codebook_size": CODES,
        "codebook_dim": 8,
        "vector_quantization_hidden_dimension": 8,
    }
    depth = {**_DECODER, "num_codebooks": BOOKS, "vocab_size": CODES, "backbone_hidden_size": 32}
    config = CsmConfig(
        **_DECODER,
        num_codebooks=BOOKS,
        vocab_size=CODES,
        text_vocab_size=VOCAB,
        max_position_embeddings=512,
        bos_token_id=None,
        pad_token_id=VOCAB - 3,
        audio_token_id=VOCAB - 3,
        audio_eos_token_id=VOCAB - 2,
        codebook_pad_token_id=CODES - 1,
        tie_codebooks_embeddings=True,
        depth_decoder_config={**depth, "max_position_embeddings": BOOKS + 1},
        codec_config={"model_type": "mimi", **codec, "num_quantizers": BOOKS},
    )
    model = CsmForConditionalGeneration(config).float()
    _spread(model)
    if sample:
        model.generation_config.update(do_sample=True, temperature=0.9, top_k=20)
        model.depth_decoder.generation_config.update(do_sample=True, temperature=0.9, top_k=20)
    model.save_pretrained(path)
    write_tokenizer(path)
    _drop_template(path)
    return path


def pocket_tts(path: Path, *, seed: int = 0, sample: bool = False, threshold: float = 1.5) -> Path:
    """Write a PocketTTS with its audio tokenizer and two voices.

    A lower threshold ends sentences sooner.
    """
    torch.manual_seed(seed)
    dim = 6
    config = PocketTTSConfig(
        **{**_DECODER, "num_key_value_heads": 4},
        vocab_size=VOCAB + 4,
        latent_dim=dim,
        pad_token_id=VOCAB - 3,
        audio_prompt_token_id=VOCAB,
        audio_latent_token_id=VOCAB + 1,
        audio_prompt_bos_token_id=VOCAB + 2,
        audio_bos_token_id=VOCAB + 3,
        frame_rate=24_000 / (24 * 4),
        max_position_embeddings=512,
        flow_head_config={
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "latent_dim": dim,
            "condition_dim": 32,
        },
    )
    model = PocketTTSForConditionalGeneration(config).float()
    _spread(model)
    with torch.no_grad():
        model.latent_mean.uniform_(-0.5, 0.5)
        model.latent_std.uniform_(0.5, 1.5)
    model.generation_config.update(
        do_sample=sample,
        temperature=0.7 if sample else 1.0,
        num_flow_steps=2,
        eos_threshold=threshold,
    )
    model.save_pretrained(path)
    write_tokenizer(path)
    _drop_template(path)
    codec = PocketTTSAudioTokenizerModel(
        PocketTTSAudioTokenizerConfig(**_MIMI, latent_dim=dim, latent_stride=4)
    )
    _spread(codec)
    codec.save_pretrained(path / "audio_tokenizer")
    (path / "voices").mkdir()
    for number, name in enumerate(VOICES):
        save_file(
            {"audio_prompt": torch.randn(1, 3 + number, dim)},
            path / "voices" / f"{name}.safetensors",
        )
    return path


def vits(path: Path, *, seed: int = 0, speakers: int = 1, stochastic: bool = True) -> Path:
    """Write a VITS over letters at 16 kHz, as in MMS."""
    torch.manual_seed(seed)
    vocab = {letter: number for number, letter in enumerate("_ abcdefghijklmnopqrstuvwxyz'-")}
    config = VitsConfig(
        vocab_size=len(vocab),
        hidden_size=16,
        num_hidden_layers=2,
        ffn_dim=24,
        flow_size=8,
        spectrogram_bins=9,
        use_stochastic_duration_prediction=stochastic,
        num_speakers=speakers,
        speaker_embedding_size=4 if speakers > 1 else 0,
        upsample_initial_channel=16,
        upsample_rates=[4, 4, 2],
        upsample_kernel_sizes=[8, 8, 4],
        resblock_kernel_sizes=[3, 5],
        resblock_dilation_sizes=[[1, 3], [1, 2]],
        duration_predictor_filter_channels=16,
        prior_encoder_num_flows=2,
        prior_encoder_num_wavenet_layers=2,
        posterior_encoder_num_wavenet_layers=1,
    )
    model = VitsModel(config).float()
    model.save_pretrained(path)
    (path / "vocab.json").write_text(json.dumps(vocab))
    settings = {
        "tokenizer_class": "VitsTokenizer",
        "pad_token": "_",
        "unk_token": "_",
        "language": "eng",
    }
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            settings
            | {"add_blank": True, "normalize": True, "phonemize": False, "is_uroman": False}
        )
    )
    return path


MAKERS = {"csm": csm, "pocket_tts": pocket_tts, "vits": vits}


def _spread(model: torch.nn.Module) -> None:
    """Spread weights so that outputs vary, codebooks included, which are initialized to zero."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("embed_sum"):
                tensor.normal_()
            elif tensor.is_floating_point() and tensor.ndim > 1:
                tensor.normal_(std=0.5 if "embed" in name else 0.2)
            elif name.endswith("layer_scale.scale"):
                tensor.fill_(0.5)


def _drop_template(path: Path) -> None:
    settings = json.loads((path / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
