"""Write a tiny random checkpoint of every kind of recognizer that loads, by `model_type`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    CanaryConfig,
    CohereAsrConfig,
    GraniteSpeech5CTCConfig,
    GraniteSpeech5FeatureExtractor,
    LasrCTCConfig,
    LasrFeatureExtractor,
    MoonshineStreamingConfig,
    NemotronAsrStreamingFeatureExtractor,
    ParakeetFeatureExtractor,
    ParakeetTokenizer,
    PreTrainedTokenizerFast,
    SeamlessM4TFeatureExtractor,
    Wav2Vec2BertConfig,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
)

from support.checkpoints.asr_checkpoints import (
    RATE,
    letters,
    spread,
    tiny_moonshine,
    tiny_parakeet,
    tiny_whisper,
)
from support.checkpoints.causal_recognizers import (
    tiny_kyutai,
    tiny_qwen3_asr,
    tiny_voxtral,
    tiny_voxtral_realtime,
)

VOCABULARY = ("<pad>", "<s>", "</s>", "<unk>", "|", *(chr(code) for code in range(0x61, 0x7B)))
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
CONVOLUTIONS: dict[str, Any] = {
    "conv_dim": (16, 16, 16),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (10, 4, 4),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
}
WAVEFORMS = {
    "data2vec-audio": "Data2VecAudioForCTC",
    "hubert": "HubertForCTC",
    "sew": "SEWForCTC",
    "sew-d": "SEWDForCTC",
    "unispeech": "UniSpeechForCTC",
    "unispeech-sat": "UniSpeechSatForCTC",
    "wav2vec2": "Wav2Vec2ForCTC",
    "wav2vec2-conformer": "Wav2Vec2ConformerForCTC",
    "wavlm": "WavLMForCTC",
}


def tiny_waveform_ctc(path: Path, class_name: str, *, norm: str = "layer", **options: Any) -> Path:
    """Write a wav2vec2 or a relative of it: convolutions over samples, tokens that are letters.

    norm: "layer" normalizes each frame, "group" the whole window.
    """
    kind = getattr(transformers, class_name)
    config = kind.config_class(
        **SIZES | CONVOLUTIONS | {"vocab_size": len(VOCABULARY), "pad_token_id": 0} | options
    )
    if hasattr(config, "feat_extract_norm"):
        config.feat_extract_norm = norm
    spread(kind(config), 0).save_pretrained(path)
    masked = norm == "layer"
    Wav2Vec2FeatureExtractor(
        sampling_rate=RATE, do_normalize=True, return_attention_mask=masked
    ).save_pretrained(path)
    return _letter_tokenizer(path)


def _letter_tokenizer(path: Path) -> Path:
    vocabulary = path / "vocab.json"
    vocabulary.write_text(json.dumps({token: index for index, token in enumerate(VOCABULARY)}))
    Wav2Vec2CTCTokenizer(str(vocabulary)).save_pretrained(path)
    return path


def tiny_wav2vec2_bert(path: Path) -> Path:
    config = Wav2Vec2BertConfig(
        **SIZES, vocab_size=len(VOCABULARY), pad_token_id=0, conv_depthwise_kernel_size=5
    )
    spread(transformers.Wav2Vec2BertForCTC(config), 0).save_pretrained(path)
    SeamlessM4TFeatureExtractor(feature_size=80, stride=2, padding_value=1).save_pretrained(path)
    return _letter_tokenizer(path)


def tiny_lasr(path: Path) -> Path:
    encoder = SIZES | {"num_mel_bins": 128, "subsampling_conv_channels": 8, "conv_kernel_size": 9}
    config = LasrCTCConfig(vocab_size=64, pad_token_id=63, encoder_config=encoder)
    spread(transformers.LasrForCTC(config), 0).save_pretrained(path)
    LasrFeatureExtractor().save_pretrained(path)
    letters(path, ParakeetTokenizer, ["<unk>"], blank="<pad>")
    return path


def tiny_granite_speech5(path: Path) -> Path:
    encoder = SIZES | {
        "vocab_size": 64,
        "num_mel_bins": 80,
        "context_size": 16,
        "subsample_layers": [0],
    }
    config = GraniteSpeech5CTCConfig(vocab_size=64, pad_token_id=63, encoder_config=encoder)
    model = spread(transformers.GraniteSpeech5ForCTC(config), 1)
    with torch.no_grad():
        model.encoder.input_linear.weight *= 40  # its log-mel features hardly differ otherwise
    model.save_pretrained(path)
    GraniteSpeech5FeatureExtractor().save_pretrained(path)
    letters(path, ParakeetTokenizer, ["<unk>"], blank="<pad>")
    return path


def tiny_transducer(
    path: Path,
    class_name: str,
    specials: tuple[str, ...] = (),
    *,
    blank: float = 6.0,
    seed: int = 0,
    **options: Any,
) -> Path:
    """Write a transducer.

    blank: makes blanks likely enough for tokens to spread over the frames.
    seed: of the weights; with some there is one token only.
    """
    kind = getattr(transformers, class_name)
    encoder = SIZES | {"subsampling_conv_channels": 8, "num_mel_bins": 80}
    config = kind.config_class(
        vocab_size=64,
        blank_token_id=63,
        pad_token_id=0,
        decoder_hidden_size=24,
        max_symbols_per_step=3,
        encoder_config=encoder | {"max_position_embeddings": 512} | options.pop("encoder", {}),
        **options,
    )
    model = spread(kind(config), seed)
    with torch.no_grad():
        model.joint.head.bias[63] += blank
    model.generation_config.decoder_start_token_id = 63
    joint = range(64, model.joint.head.out_features)  # durations are no tokens
    model.generation_config.suppress_tokens = list(joint) or None
    model.save_pretrained(path)
    extractor = NemotronAsrStreamingFeatureExtractor if "Nemotron" in class_name else None
    (extractor or ParakeetFeatureExtractor)().save_pretrained(path)
    letters(path, ParakeetTokenizer, ["<unk>", *specials], blank="<blank>")
    return path


def tiny_nemotron(
    path: Path, class_name: str = "NemotronAsrStreamingForRNNT", **options: Any
) -> Path:
    """Write a streaming transducer that remembers 19 frames and looks 4 ahead in recordings."""
    encoder = {"sliding_window": 20, "default_num_lookahead_tokens": 4}
    tiny_transducer(path, class_name, encoder=encoder, **{"blank": 0.0} | options)
    settings = {"supported_num_lookahead_tokens": [4, 1, 0], "default_num_lookahead_tokens": 4}
    (path / "processor_config.json").write_text(json.dumps(settings | PROMPTS))
    return path


PROMPTS = {"prompt_dictionary": {"en-US": 0, "en": 0, "de-DE": 1, "de": 1, "auto": 2}}


def tiny_prompted_nemotron(path: Path) -> Path:
    """Write a streaming transducer that gets the language, or names it by a tag."""
    sizes = {"num_prompts": 3, "prompt_intermediate_size": 24, "default_prompt_id": 2}
    options = {"specials": ("<en-US>", "<de-DE>"), "blank": 11.0, "seed": 1}
    return tiny_nemotron(path, "Nemotron3_5AsrForRNNT", **options, **sizes)


PROMPT_TOKENS = (
    "<|startofcontext|>",
    "<|startoftranscript|>",
    "<|emo:undefined|>",
    "<|pnc|>",
    "<|noitn|>",
    "<|notimestamp|>",
    "<|nodiarize|>",
    "<|en|>",
    "<|de|>",
    "<|fr|>",
)


def tiny_canary(path: Path) -> Path:
    """Write a Canary that knows three languages and writes 40 tokens at most."""
    encoder = SIZES | {"subsampling_conv_channels": 8, "num_mel_bins": 80, "scale_input": False}
    decoder = SIZES | {"vocab_size": 80, "head_dim": 8, "num_key_value_heads": 4}
    config = CanaryConfig(
        vocab_size=80,
        decoder_start_token_id=4,
        encoder_config=encoder,
        decoder_config=decoder | {"max_position_embeddings": 40},
    )
    return _prompted(path, transformers.CanaryForConditionalGeneration(config))


def tiny_cohere(path: Path) -> Path:
    """Write a transcriber of Cohere's that knows three languages and writes 40 tokens at most."""
    encoder = SIZES | {"hidden_size": 24, "subsampling_conv_channels": 8, "num_mel_bins": 80}
    config = CohereAsrConfig(
        **SIZES,
        vocab_size=80,
        decoder_start_token_id=14,
        max_position_embeddings=40,
        encoder_config=encoder,
    )
    return _prompted(path, transformers.CohereAsrForConditionalGeneration(config))


def _prompted(path: Path, model: Any) -> Path:
    spread(model, 0)
    with torch.no_grad():
        model.proj_out.bias[model.config.eos_token_id] -= 2  # else most answers are empty
    model.save_pretrained(path)
    kind = "CohereAsr" if "Cohere" in type(model).__name__ else "Parakeet"
    extractor = getattr(transformers, f"{kind}FeatureExtractor")
    extractor(feature_size=80).save_pretrained(path)
    specials = ["<unk>", "<s>", "<pad>", "</s>", *PROMPT_TOKENS]
    letters(path, PreTrainedTokenizerFast, specials, size=80)
    return path


def tiny_streaming_moonshine(path: Path) -> Path:
    encoder = SIZES | {"num_key_value_heads": 4, "sliding_windows": ((16, 4), (16, 0))}
    config = MoonshineStreamingConfig(
        **SIZES | {"hidden_size": 24, "num_key_value_heads": 4},
        vocab_size=64,
        max_position_embeddings=512,
        decoder_start_token_id=1,
        encoder_config=encoder,
    )
    model = transformers.MoonshineStreamingForConditionalGeneration(config)
    spread(model, 0).save_pretrained(path)
    Wav2Vec2FeatureExtractor(
        sampling_rate=RATE, do_normalize=False, return_attention_mask=True
    ).save_pretrained(path)
    letters(path, PreTrainedTokenizerFast, ["<unk>", "<s>", "</s>"])
    return path


def _waveform(class_name: str) -> Callable[[Path], Path]:
    return lambda path: tiny_waveform_ctc(path, class_name)


TINY: dict[str, Callable[[Path], Path]] = {
    **{kind: _waveform(class_name) for kind, class_name in WAVEFORMS.items()},
    "canary": tiny_canary,
    "cohere_asr": tiny_cohere,
    "granite_speech5_ctc": tiny_granite_speech5,
    "kyutai_speech_to_text": tiny_kyutai,
    "lasr_ctc": tiny_lasr,
    "moonshine": tiny_moonshine,
    "parakeet_ctc": tiny_parakeet,
    "moonshine_streaming": tiny_streaming_moonshine,
    "nemotron3_5_asr": tiny_prompted_nemotron,
    "nemotron_asr_streaming": tiny_nemotron,
    "parakeet_rnnt": lambda path: tiny_transducer(path, "ParakeetForRNNT"),
    "parakeet_tdt": lambda path: tiny_transducer(path, "ParakeetForTDT", blank=4.0),
    "qwen3_asr": tiny_qwen3_asr,
    "voxtral": tiny_voxtral,
    "voxtral_realtime": tiny_voxtral_realtime,
    "wav2vec2-bert": tiny_wav2vec2_bert,
    "whisper": tiny_whisper,
}


class Checkpoints(dict[str, Path]):
    """Hold tiny checkpoints by `model_type`, each written when it is first needed."""

    def __init__(self, folder: Callable[[str], Path]):
        super().__init__()
        self._folder = folder

    def __missing__(self, kind: str) -> Path:
        self[kind] = TINY[kind](self._folder(kind))
        return self[kind]
