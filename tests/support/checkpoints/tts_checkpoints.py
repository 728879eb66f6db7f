"""Write tiny speech synthesis checkpoints with random weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from snac import SNAC
from transformers import (
    BarkConfig,
    BarkModel,
    CsmConfig,
    CsmForConditionalGeneration,
    DacConfig,
    DacModel,
    DiaConfig,
    DiaForConditionalGeneration,
    GradiumPhononTTSConfig,
    GradiumPhononTTSForConditionalGeneration,
    HiggsAudioV2Config,
    HiggsAudioV2ForConditionalGeneration,
    HiggsAudioV2TokenizerConfig,
    HiggsAudioV2TokenizerModel,
    LlamaConfig,
    LlamaForCausalLM,
    PocketTTSAudioTokenizerConfig,
    PocketTTSAudioTokenizerModel,
    PocketTTSConfig,
    PocketTTSForConditionalGeneration,
    SpeechT5Config,
    SpeechT5ForTextToSpeech,
    SpeechT5HifiGan,
    SpeechT5HifiGanConfig,
    VibeVoiceConfig,
    VibeVoiceForConditionalGeneration,
    VitsConfig,
    VitsModel,
)

from support.checkpoints.language_checkpoints import VOCAB, write_tokenizer
from support.checkpoints.sentencepieces import write_letters

VIBEVOICE_END = VOCAB + 3  # the token that ends a sentence of VibeVoice
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
_LATENT_DIM = 6
_LATENTS: dict[str, Any] = {
    **{**_DECODER, "num_key_value_heads": 4},
    "vocab_size": VOCAB + 4,
    "latent_dim": _LATENT_DIM,
    "pad_token_id": VOCAB - 3,
    "audio_prompt_token_id": VOCAB,
    "audio_latent_token_id": VOCAB + 1,
    "audio_bos_token_id": VOCAB + 3,
    "frame_rate": 24_000 / (24 * 4),
    "max_position_embeddings": 512,
    "flow_head_config": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "latent_dim": _LATENT_DIM,
        "condition_dim": 32,
    },
}
_DAC: dict[str, Any] = {
    "encoder_hidden_size": 4,
    "decoder_hidden_size": 32,
    "codebook_dim": 4,
    "codebook_size": 32,
}
_SNAC: dict[str, Any] = {
    "sampling_rate": 24_000,
    "encoder_dim": 4,
    "encoder_rates": [2, 4],
    "decoder_dim": 32,
    "decoder_rates": [4, 2],
    "attn_window_size": None,
    "codebook_size": 32,
    "codebook_dim": 4,
    "vq_strides": [4, 2, 1],
    "noise": True,
    "depthwise": True,
}
_PLACES = 7  # codes of a frame
_TURNS = (
    "{% for turn in messages %}[{{ turn.role }}]{% for part in turn.content %}"
    "{{ part.text if part.type == 'text' else '<|out_bos|><|out|>' }}"
    "{% endfor %}{% endfor %}[audio]<|out_bos|>"
)
_SCRIPT = (
    "{% for turn in messages %}Speaker {{ turn.role }}:{% for part in turn.content %}"
    "{{ part.text if part.type == 'text' else '<|vision_start|><|vision_pad|><|vision_end|>' }}"
    "{% endfor %}\n{% endfor %}Speech:<|vision_start|>"
)
_AUDIO_TOKENS = ("<|out|>", "<|out_bos|>", "<|delay|>", "<|end|>")
BOOKS, CODES = 4, 32
VOICES = ("anna", "ben")


def csm(path: Path, *, seed: int = 0, sample: bool = False, positions: int = 512) -> Path:
    """Write a CSM with four codebooks of 32 codes; its sentences end with its positions."""
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
        max_position_embeddings=positions,
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
    config = PocketTTSConfig(**_LATENTS, audio_prompt_bos_token_id=VOCAB + 2)
    model = PocketTTSForConditionalGeneration(config).float()
    return _latents(path, model, _LATENT_DIM, sample=sample, threshold=threshold)


def phonon(path: Path, *, seed: int = 0, sample: bool = False, threshold: float = 1.5) -> Path:
    """Write a Phonon with its audio tokenizer and two voices, of a codec of their own."""
    torch.manual_seed(seed)
    speakers = {"num_speakers_vocab_size": 4, "num_speakers_embedding_dim": 4}
    config = GradiumPhononTTSConfig(
        **_LATENTS, **speakers, audio_prompt_dim=10, duration_delta_embedding_dim=8
    )
    model = GradiumPhononTTSForConditionalGeneration(config).float()
    return _latents(path, model, 10, sample=sample, threshold=threshold)


def _latents(path: Path, model: Any, voice_dim: int, *, sample: bool, threshold: float) -> Path:
    """Write a model of audio latents, its audio tokenizer and two voices."""
    dim = _LATENT_DIM
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
            {"audio_prompt": torch.randn(1, 3 + number, voice_dim)},
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


def speecht5(path: Path, *, seed: int = 0, sample: bool = True, positions: int = 120) -> Path:
    """Write a SpeechT5 over letters with its vocoder and two voices; its noise is dropout."""
    torch.manual_seed(seed)
    speaker_dim = 6
    vocab = write_letters(path / "spm_char.model")
    config = SpeechT5Config(
        vocab_size=vocab,
        hidden_size=16,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=24,
        decoder_layers=2,
        decoder_ffn_dim=24,
        decoder_attention_heads=2,
        num_mel_bins=8,
        speech_decoder_prenet_units=12,
        speech_decoder_postnet_units=12,
        speech_decoder_postnet_layers=3,
        speaker_embedding_dim=speaker_dim,
        max_text_positions=positions,
        encoder_max_relative_position=20,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=2,
    )
    model = SpeechT5ForTextToSpeech(config).float()
    _spread(model)
    with torch.no_grad():
        model.speech_decoder_postnet.prob_out.bias.fill_(-8.0)
    model.save_pretrained(path)
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "SpeechT5Tokenizer"}')
    vocoder = SpeechT5HifiGan(
        SpeechT5HifiGanConfig(
            model_in_dim=8,
            upsample_initial_channel=16,
            upsample_rates=[4, 4, 2],
            upsample_kernel_sizes=[8, 8, 4],
            resblock_kernel_sizes=[3, 5],
            resblock_dilation_sizes=[[1, 3], [1, 2]],
        )
    )
    _spread(vocoder)
    vocoder.save_pretrained(path / "vocoder")
    (path / "voices").mkdir()
    for name in VOICES:
        save_file({"speaker": torch.randn(1, speaker_dim)}, path / "voices" / f"{name}.safetensors")
    return path


def dia(
    path: Path,
    *,
    seed: int = 0,
    sample: bool = False,
    guidance: float = 3.0,
    ends: bool = False,
    positions: int = 128,
) -> Path:
    """Write a Dia with four codebooks of 32 codes.

    ends: its sentences end soon.
    """
    torch.manual_seed(seed)
    shared = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    cross = {"cross_num_attention_heads": 4, "cross_head_dim": 8, "cross_num_key_value_heads": 4}
    config = DiaConfig(
        encoder_config={**shared, "num_key_value_heads": 4, "max_position_embeddings": positions},
        decoder_config={
            **shared,
            **cross,
            "num_key_value_heads": 2,
            "cross_hidden_size": 32,
            "num_channels": BOOKS,
            "vocab_size": CODES + 4,
            "eos_token_id": CODES,
            "pad_token_id": CODES + 1,
            "bos_token_id": CODES + 2,
            "max_position_embeddings": 512,
        },
        delay_pattern=[0, 2, 3, 4],
    )
    model = DiaForConditionalGeneration(config).float()
    _spread(model)
    if ends:
        with torch.no_grad():
            model.logits_dense.weight[CODES] *= 1.7
    model.save_pretrained(path)
    generation = {
        "do_sample": sample,
        "temperature": 1.3 if sample else 1.0,
        "top_k": 12,  # guidance has it, too
        "guidance_scale": guidance,
        "eos_token_id": CODES,
        "pad_token_id": CODES + 1,
        "bos_token_id": CODES + 2,
        "decoder_start_token_id": CODES + 2,
    }
    (path / "generation_config.json").write_text(json.dumps(generation))
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "DiaTokenizer"}')
    codec = DacModel(DacConfig(**_DAC, downsampling_ratios=[2, 4, 4], n_codebooks=BOOKS))
    _spread_evenly(codec)
    codec.save_pretrained(path / "audio_tokenizer")
    return path


def higgs_audio_v2(path: Path, *, seed: int = 0, sample: bool = False, ends: bool = False) -> Path:
    """Write a Higgs Audio v2 with four codebooks of 32 codes.

    ends: its sentences end soon.
    """
    torch.manual_seed(seed)
    config = HiggsAudioV2Config(
        **_DECODER,
        vocab_size=VOCAB + 4,
        num_codebooks=BOOKS,
        codebook_size=CODES + 2,
        audio_token_id=VOCAB,
        audio_bos_token_id=VOCAB + 1,
        audio_delay_token_id=VOCAB + 2,
        eos_token_id=VOCAB + 3,
        pad_token_id=VOCAB - 3,
        audio_stream_bos_id=CODES,
        audio_stream_eos_id=CODES + 1,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    model = HiggsAudioV2ForConditionalGeneration(config).float()
    _spread(model)
    if not ends:
        with torch.no_grad():
            model.audio_lm_head.weight.unflatten(0, (BOOKS, -1))[:, CODES + 1] = 0
    if sample:
        model.generation_config.update(do_sample=True, temperature=0.9, top_k=20)
        model.generation_config.ras_win_len, model.generation_config.ras_win_max_num_repeat = 5, 2
    model.save_pretrained(path)
    write_tokenizer(path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": _TURNS}))
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    like = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [
        like | {"id": VOCAB + number, "content": token}
        for number, token in enumerate(_AUDIO_TOKENS)
    ]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    ratios = [10, 8, 6]  # 480 samples in a frame, which are HuBERT's 320 at 16 kHz
    dac = {**_DAC, "model_type": "dac", "downsampling_ratios": ratios, "hidden_size": 32}
    hubert = {
        "model_type": "hubert",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "conv_dim": [4] * 7,
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
    }
    codec = HiggsAudioV2TokenizerModel(
        HiggsAudioV2TokenizerConfig(
            acoustic_model_config={**dac, "upsampling_ratios": ratios},
            semantic_model_config=hubert,
            codebook_size=CODES,
            codebook_dim=8,
            target_bandwidths=[1],  # kbit/s: 50 frames of 4 codebooks of 5 bits a second
        )
    )
    _spread_evenly(codec)
    codec.save_pretrained(path / "audio_tokenizer")
    return path


def orpheus(path: Path, *, seed: int = 0, sample: bool = False, ends: bool = False) -> Path:
    """Write a Llama whose tokens are codes, seven in a frame, and its SNAC.

    Its weights prefer the codes of the place that is due. ends: its sentences end soon.
    """
    torch.manual_seed(seed)
    snac = SNAC(**_SNAC)
    codes = CODES * _PLACES
    first, last = VOCAB + 1, VOCAB + 1 + 10 + codes  # <custom_token_0>, behind <|eot_id|>
    config = LlamaConfig(
        **{**_DECODER, "hidden_size": 64, "num_attention_heads": 8},
        vocab_size=last,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=VOCAB - 3,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).float()
    _spread(model)
    due_SE = torch.linalg.qr(torch.randn(64, 64)).Q[:_PLACES]
    with torch.no_grad():
        model.model.embed_tokens.weight[first + 1] += 30 * due_SE[0]  # the speech begins
        for token in range(first + 10, last):
            place = (token - first - 10) // CODES
            model.model.embed_tokens.weight[token] += 30 * due_SE[(place + 1) % _PLACES]
            model.lm_head.weight[token] += 5 * due_SE[place]
        if ends:
            model.lm_head.weight[first + 2] += 5 * due_SE[0]
    model.generation_config.update(do_sample=sample, repetition_penalty=1.1)
    if sample:
        model.generation_config.update(temperature=0.9, top_k=20)
    model.save_pretrained(path)
    write_tokenizer(path)
    _drop_template(path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    like = tokenizer["added_tokens"][0]
    names = ["<|eot_id|>", *(f"<custom_token_{number}>" for number in range(last - first))]
    tokenizer["added_tokens"] += [
        like | {"id": VOCAB + number, "content": name} for number, name in enumerate(names)
    ]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "processor_config.json").write_text(json.dumps({"voices": VOICES}))
    _spread_evenly(snac)
    with torch.no_grad():
        snac.decoder.model[-2].parametrizations.weight.original0.mul_(8)  # loud
    codec = path / "audio_tokenizer"
    codec.mkdir()
    (codec / "config.json").write_text(json.dumps(_SNAC))
    torch.save(snac.state_dict(), codec / "pytorch_model.bin")
    return path


def vibevoice(
    path: Path,
    *,
    seed: int = 0,
    sample: bool = False,
    ends: bool = False,
    guidance: float = 1.5,
    penalty: float = 1.0,
) -> Path:
    """Write a VibeVoice with frames of 24 samples; its noise is the diffusion's.

    ends: it chooses its tokens, so that it may stop audio, begin it anew, and end; without, each
        of its tokens asks for audio.
    """
    torch.manual_seed(seed)
    audio, begin, stop, end = range(VOCAB, VIBEVOICE_END + 1)
    sizes = {"num_filters": 4, "downsampling_ratios": [4, 6], "depths": [1, 1, 1], "kernel_size": 3}
    config = VibeVoiceConfig(
        text_config={
            "model_type": "qwen2",
            **_DECODER,
            "vocab_size": end + 1,
            "max_position_embeddings": 512,
        },
        audio_config={"model_type": "vibevoice_acoustic_tokenizer", "hidden_size": 6, **sizes},
        semantic_model_config={
            "model_type": "vibevoice_acoustic_tokenizer_encoder",
            "hidden_size": 5,
            **sizes,
        },
        diffusion_head_config={
            "num_hidden_layers": 2,
            "intermediate_size": 48,
            "frequency_embedding_size": 16,
        },
        pad_token_id=end,
        eos_token_id=end,
        audio_bos_token_id=begin,
        audio_eos_token_id=stop,
        audio_token_id=audio,
    )
    model = VibeVoiceForConditionalGeneration(config).float()
    _spread(model)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("gamma"):
                tensor.fill_(0.5)
        if not ends:
            model.lm_head.weight[audio:] = 0  # of equal ones, the first is taken
        # What is heard is an input again: rounding errors must not grow from frame to frame.
        for connector in (model.model.multi_modal_projector, model.model.semantic_connector):
            connector.linear_2.weight.mul_(0.05)
            connector.linear_2.bias.normal_()
        model.model.audio_tower.decoder.head.conv.weight.mul_(0.1)
        model.model.latent_scaling_factor.fill_(0.7)
        model.model.latent_bias_factor.fill_(0.1)
    model.generation_config.update(
        guidance_scale=guidance, num_diffusion_steps=3, repetition_penalty=penalty
    )
    model.save_pretrained(path)
    write_tokenizer(path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": _SCRIPT}))
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    like = tokenizer["added_tokens"][0]
    names = ("<|vision_pad|>", "<|vision_start|>", "<|vision_end|>", "<|the_end|>")
    tokenizer["added_tokens"] += [
        like | {"id": VOCAB + number, "content": name} for number, name in enumerate(names)
    ]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def bark(path: Path, *, seed: int = 0, sample: bool = False) -> Path:
    """Write a Bark of few tokens and short windows, with a voice besides the default one."""
    torch.manual_seed(seed)
    semantic, codes = 40, 16  # 40: the end; text follows
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "block_size": 400}
    vocab = semantic + 8 + VOCAB + 2
    fine = {**sizes, "input_vocab_size": codes + 1, "output_vocab_size": codes + 1}
    config = BarkConfig(
        semantic_config={**sizes, "input_vocab_size": vocab, "output_vocab_size": semantic + 4},
        coarse_acoustics_config={
            **sizes,
            "input_vocab_size": semantic + 2 * codes + 4,
            "output_vocab_size": semantic + 2 * codes + 4,
        },
        fine_acoustics_config={**fine, "n_codes_total": 4},
        codec_config={
            "model_type": "encodec",
            "sampling_rate": 24_000,
            "num_filters": 4,
            "hidden_size": 16,
            "codebook_size": codes,
            "codebook_dim": 16,
            "upsampling_ratios": [4, 3],
            "target_bandwidths": [32.0],
        },
    )
    model = BarkModel(config).float()
    _spread(model)
    with torch.no_grad():
        for name, tensor in model.codec_model.decoder.named_parameters():
            if name.endswith("original0"):
                tensor.fill_(1.1)
            elif "bias" in name:
                tensor.zero_()
    drawn = {"do_sample": True, "temperature": 0.7} if sample else {"do_sample": False}
    model.save_pretrained(path)
    write_tokenizer(path)
    _drop_template(path)
    settings = dict(
        semantic_config={
            **drawn,
            "eos_token_id": semantic,
            "max_new_tokens": 30,
            "text_encoding_offset": semantic + 8,
            "text_pad_token": vocab - 2,
            "semantic_pad_token": semantic,
            "semantic_infer_token": vocab - 1,
            "semantic_vocab_size": semantic,
            "max_input_semantic_length": 300,
        },
        coarse_acoustics_config={
            **drawn,
            "coarse_semantic_pad_token": semantic + 2 * codes,
            "coarse_infer_token": semantic + 2 * codes + 1,
            "max_coarse_input_length": 16,
            "max_coarse_history": 24,
            "sliding_window_len": 10,
        },
        fine_acoustics_config={
            "temperature": 0.5 if sample else 1.0,
            "max_fine_history_length": 16,
            "max_fine_input_length": 32,
            "n_fine_codebooks": 4,
        },
        sample_rate=24_000,
        codebook_size=codes,
    )
    (path / "generation_config.json").write_text(json.dumps(settings))
    prompts = {
        "semantic_prompt": torch.randint(semantic, (20,)),
        "coarse_prompt": torch.randint(codes, (2, 30)),
        "fine_prompt": torch.randint(codes, (4, 30)),
    }
    for name, prompt in prompts.items():
        np.save(path / f"anna_{name}.npy", prompt.numpy())
    named = {"repo_or_path": "x", "anna": {name: f"anna_{name}.npy" for name in prompts}}
    (path / "speaker_embeddings_path.json").write_text(json.dumps(named))
    return path


MAKERS: dict[str, Callable[..., Path]] = {
    "bark": bark,
    "csm": csm,
    "dia": dia,
    "gradium_phonon_tts": phonon,
    "higgs_audio_v2": higgs_audio_v2,
    "llama": orpheus,
    "pocket_tts": pocket_tts,
    "speecht5": speecht5,
    "vibevoice": vibevoice,
    "vits": vits,
}


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


def _spread_evenly(codec: torch.nn.Module) -> None:
    """Spread a codec's weights so that its values stay about 1.

    DAC's activations are sines, whose large arguments would make rounding errors large.
    """
    with torch.no_grad():
        for name, tensor in [*codec.named_parameters(), *codec.named_buffers()]:
            if name.endswith(".alpha"):
                tensor.fill_(1.0)
            elif "codebook" in name and tensor.is_floating_point():
                tensor.normal_()
            elif tensor.is_floating_point() and tensor.ndim > 1:
                tensor.normal_(std=0.5 * tensor[0].numel() ** -0.5)


def _drop_template(path: Path) -> None:
    settings = json.loads((path / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
