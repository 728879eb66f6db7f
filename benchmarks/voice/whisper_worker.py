"""Run faster-whisper under the load of `voice.py`, in an environment of its own.

python -m benchmarks.voice.whisper_worker convert FOLDER TARGET int8    converts a Whisper of transformers for
CTranslate2

python -m benchmarks.voice.whisper_worker measure '<JSON of a task>'    prints JSON, as `voice.asr_worker`
does

It needs only faster-whisper and its dependencies. One clip goes through `WhisperModel.transcribe`,
several through `BatchedInferencePipeline`: greedily, without timestamps, fallback or voice activity
detection.
"""

from __future__ import annotations

import json
import shutil
import struct
import sys
import time
from pathlib import Path
from typing import Any

import ctranslate2
import numpy as np
from ctranslate2.specs import whisper_spec
from faster_whisper import BatchedInferencePipeline, WhisperModel

from benchmarks.voice.clips import RATE, Sound, clips
from benchmarks.voice.timing import Part, Times, measured

PROMPT = 4  # tokens: start, language, task, no timestamps


# ---------------------------------------------------------------------------------------------------------- conversion
def convert(folder: Path, target: Path, kind: str) -> None:
    """Write a checkpoint as CTranslate2's converter does, but without torch and transformers."""
    config = json.loads((folder / "config.json").read_text())
    layers, heads = config["encoder_layers"], config["encoder_attention_heads"]
    spec = whisper_spec.WhisperSpec(
        layers, heads, config["decoder_layers"], config["decoder_attention_heads"]
    )
    weights = tensors(folder / "model.safetensors")
    encoder, decoder = _Part(weights, "model.encoder."), _Part(weights, "model.decoder.")
    for name in ("conv1", "conv2"):
        encoder.linear(getattr(spec.encoder, name), name)
    decoder_spec = spec.decoder
    for part, part_spec in ((encoder, spec.encoder), (decoder, decoder_spec)):
        part_spec.position_encodings.encodings = part["embed_positions.weight"]
        part.norm(part_spec.layer_norm, "layer_norm")
        for index, layer in enumerate(part_spec.layer):
            part.layer(layer, f"layers.{index}.")
    decoder_spec.embeddings.weight = decoder["embed_tokens.weight"]
    decoder_spec.projection.weight = decoder["embed_tokens.weight"]
    generation = json.loads((folder / "generation_config.json").read_text())
    spec.config.suppress_ids = generation["suppress_tokens"]
    spec.config.suppress_ids_begin = generation["begin_suppress_tokens"]
    spec.config.alignment_heads = generation["alignment_heads"]
    spec.config.lang_ids = sorted(generation["lang_to_id"].values())
    spec.register_vocabulary(_vocabulary(folder))
    spec.validate()
    spec.optimize(quantization=kind)
    target.mkdir()
    spec.save(str(target))
    for name in ("tokenizer.json", "preprocessor_config.json"):
        shutil.copy(folder / name, target / name)


class _Part:
    """Copy tensors of the encoder or decoder, named by a prefix, to CTranslate2's spec."""

    def __init__(self, weights: dict[str, np.ndarray], prefix: str):
        self._weights, self._prefix = weights, prefix

    def __getitem__(self, name: str) -> np.ndarray:
        return self._weights[self._prefix + name]

    def linear(self, spec: Any, *names: str) -> None:
        """Set one matrix from the named ones, stacked; a key projection without bias gets zeros."""
        weights = [self[f"{name}.weight"] for name in names]
        spec.weight = weights[0] if len(weights) == 1 else np.concatenate(weights)
        biases = [self._weights.get(f"{self._prefix}{name}.bias") for name in names]
        pairs = zip(biases, weights, strict=True)
        spec.bias = np.concatenate(
            [np.zeros(len(w), w.dtype) if b is None else b for b, w in pairs]
        )

    def norm(self, spec: Any, name: str) -> None:
        spec.gamma, spec.beta = self[f"{name}.weight"], self[f"{name}.bias"]

    def layer(self, spec: Any, name: str) -> None:
        own = f"{name}self_attn."
        self.linear(spec.self_attention.linear[0], *(f"{own}{which}_proj" for which in "qkv"))
        self.linear(spec.self_attention.linear[1], f"{own}out_proj")
        self.norm(spec.self_attention.layer_norm, f"{name}self_attn_layer_norm")
        if f"{self._prefix}{name}encoder_attn.q_proj.weight" in self._weights:
            cross = f"{name}encoder_attn."
            self.linear(spec.attention.linear[0], f"{cross}q_proj")
            self.linear(spec.attention.linear[1], f"{cross}k_proj", f"{cross}v_proj")
            self.linear(spec.attention.linear[2], f"{cross}out_proj")
            self.norm(spec.attention.layer_norm, f"{name}encoder_attn_layer_norm")
        self.linear(spec.ffn.linear_0, f"{name}fc1")
        self.linear(spec.ffn.linear_1, f"{name}fc2")
        self.norm(spec.ffn.layer_norm, f"{name}final_layer_norm")


def tensors(path: Path) -> dict[str, np.ndarray]:
    """Return the float32 tensors of a safetensors file."""
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "F32":
            raise ValueError(f"{path}: {name} is {entry['dtype']}; write the checkpoint in float32")
        first, last = (8 + length + offset for offset in entry["data_offsets"])
        found[name] = np.frombuffer(data[first:last], np.float32).reshape(entry["shape"]).copy()
    return found


def _vocabulary(folder: Path) -> list[str]:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = dict(tokenizer["model"]["vocab"]) | {
        token["content"]: token["id"] for token in tokenizer["added_tokens"]
    }
    return sorted(ids, key=ids.__getitem__)


# ----------------------------------------------------------------------------------------------------------- measuring
class FasterWhisper:
    def __init__(self, task: dict[str, Any]):
        self._model = WhisperModel(
            task["file"], compute_type=task["format"], cpu_threads=task["threads"]
        )
        self._batched = BatchedInferencePipeline(self._model)
        self._suppressed = json.loads(
            (Path(task["folder"]) / "generation_config.json").read_text()
        )["suppress_tokens"]

    def whole(self, sounds: list[Sound], tokens: int) -> list[list[int]]:
        options = {
            "language": "en", "beam_size": 1, "best_of": 1, "temperature": 0.0, "without_timestamps": True,
            "suppress_tokens": self._suppressed, "max_new_tokens": self._limit(tokens), "vad_filter": False,
            "condition_on_previous_text": False, "compression_ratio_threshold": None, "log_prob_threshold": None,
            "no_speech_threshold": None,
        }  # fmt: skip
        if len(sounds) == 1:
            return [
                [
                    token
                    for segment in self._model.transcribe(sounds[0], **options)[0]
                    for token in segment.tokens
                ]
            ]
        ends = np.cumsum([len(sound) for sound in sounds]) / RATE
        spans = [
            {"start": end - len(sound) / RATE, "end": end}
            for end, sound in zip(ends, sounds, strict=True)
        ]
        segments, _ = self._batched.transcribe(
            np.concatenate(sounds), clip_timestamps=spans, batch_size=len(sounds), **options
        )
        return [list(segment.tokens) for segment in segments]

    def _limit(self, tokens: int) -> int:
        """Return the max_new_tokens for which it generates `tokens`.

        CTranslate2 uses half of the length, prompt included, and counts an end token.
        """
        return 2 * (tokens + 1) - PROMPT

    def parts(self, sounds: list[Sound]) -> dict[Part, float]:
        """Return the seconds of the features and of the encoder."""
        extractor, start = self._model.feature_extractor, time.perf_counter()
        length = extractor.nb_max_frames
        features = [extractor(sound)[:, :length] for sound in sounds]
        padded = np.stack([np.pad(one, ((0, 0), (0, length - one.shape[1]))) for one in features])
        middle = time.perf_counter()
        np.asarray(self._model.encode(padded).to_device(ctranslate2.Device.cpu))
        return {"features": middle - start, "encoder": time.perf_counter() - middle}

    def describe(self) -> str:
        return f"CTranslate2 {ctranslate2.__version__}, {self._model.model.compute_type}"


def measure(task: dict[str, Any]) -> Times:
    return measured(FasterWhisper, task, clips)


if __name__ == "__main__":
    if sys.argv[1] == "convert":
        convert(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
    else:
        print(json.dumps(measure(json.loads(sys.argv[2]))))
