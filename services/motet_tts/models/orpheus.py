"""Speak with a language model whose tokens are codes of SNAC (Orpheus's layout), served by decode.

The decode engine generates the tokens as it generates any text; this model makes the prompt, reads
codes from the tokens as they come, and decodes them. Prompt and tokens are those of Orpheus
(Canopy Labs, 2025): `<custom_token_N>` with N from 10 on are the codes of a frame's places, 0 to 9
are control tokens.

Shapes: S codes of a frame.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from motet_shared.errors import ConfigError
from motet_shared.messages import Generate, Sampling
from motet_tts.codecs.chunks import ChunkDecoder
from motet_tts.codecs.codec import State, codec_folder, processor_settings
from motet_tts.codecs.snac import SnacDecoder, is_snac
from motet_tts.engine.utterance import Key, StepOutput, Utterance

from .codec_lm import room_for
from .control_tokens import ControlTokens
from .noise import hash_numbers

# Names of Orpheus's English voices; "voices" of processor_config.json names others.
_VOICES = ("tara", "leah", "jess", "leo", "dan", "mia", "zac", "zoe")
_SAMPLING = {"temperature": 0.6, "top_p": 0.8, "repetition_penalty": 1.3}  # Orpheus's own
_SPEECH_BEGINS, _SPEECH_ENDS, _TEXT_BEGINS, _TEXT_ENDS, _ANSWER_BEGINS, _CODES = 1, 2, 3, 4, 5, 10
_SECONDS = (3.0, 0.25)  # limit of a sentence: a base and per character; far more than speech needs
_SEED_BITS = 63


@dataclass(slots=True)
class _Sentence:
    """Hold the state of one sentence.

    key_of_noise: of the codec's noise.
    codes: of the frame that is not complete yet.
    waiting, decoded, done: as in `Framed`.
    """

    key: Key
    request: Generate
    key_of_noise: int
    codec: State
    codes: list[int] = field(default_factory=list)
    waiting: list[Tensor] = field(default_factory=list)
    decoded: int = 0
    done: bool = False


class Orpheus:
    """Run the codec of a checkpoint folder; its SNAC is in the folder `audio_tokenizer` or named.

    served_as: what the decode engines call the language model.

    Raises ConfigError if there is no SNAC, or the tokenizer lacks the tokens of its codes.
    """

    rates = (1.0, 1.0)
    clones = False
    instructs = False
    dtype = torch.float32  # of the codec; decode has its own

    def __init__(
        self,
        folder: Path,
        *,
        device: torch.device,
        served_as: str,
        greedy: bool,
        first_chunk: float,
        chunk: float,
    ):
        codec = Path(codec_folder(folder))
        if not is_snac(codec):
            raise ConfigError(
                f"model={str(folder)!r}: {str(codec)!r} is no folder of a SNAC; a language model speaks with one"
            )
        self._codec, self.device = SnacDecoder(codec, device), device
        self.sample_rate = self._codec.sample_rate
        self._chunks = ChunkDecoder(self._codec, device, first_chunk=first_chunk, chunk=chunk)
        self._served_as = served_as
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._control = ControlTokens(self._tokenizer)
        self._tokens = _Tokens.of(
            folder, self._tokenizer, len(self._codec.order) * self._codec.codes
        )
        self._sampling = _sampling(folder, greedy, self._tokens.control(_SPEECH_ENDS))
        settings = json.loads((folder / "config.json").read_text())
        self._context = int(settings.get("max_position_embeddings", 1 << 20))
        self.voices = tuple(processor_settings(folder).get("voices") or _VOICES)
        self._sentences: dict[Key, _Sentence] = {}
        self._unasked: list[_Sentence] = []

    def __len__(self) -> int:
        return len(self._sentences)

    @property
    def has_work(self) -> bool:
        """Return True if a request is to be sent or a chunk decoded; tokens come from outside."""
        return bool(self._unasked) or any(map(self._chunks.is_due, self._sentences.values()))

    def add(self, key: Key, utterance: Utterance) -> None:
        """Add a sentence: the next step asks for its tokens. Raises BadRequest if it is too long."""
        tokens, text = self._tokens, self._control.plain(utterance.text)
        ids = list(self._tokenizer(f"{utterance.voice}: {text}")["input_ids"])
        prompt = [
            tokens.control(_TEXT_BEGINS),
            *ids,
            tokens.end_of_turn,
            *map(tokens.control, (_TEXT_ENDS, _ANSWER_BEGINS, _SPEECH_BEGINS)),
        ]
        size, codec = len(self._codec.order), self._codec
        seconds = _SECONDS[0] + _SECONDS[1] * len(utterance.text)
        budget = math.ceil(seconds * codec.sample_rate / codec.frame_samples)
        limit = min((utterance.max_frames or budget) * size, room_for(len(prompt), self._context))
        seed = hash_numbers(utterance.seed, utterance.index) >> (64 - _SEED_BITS)
        sampling = Sampling(**{**self._sampling, "seed": seed, "max_tokens": limit})
        request = Generate(model=self._served_as, prompt=prompt, sampling=sampling)
        sentence = _Sentence(key, request, seed, codec.begin())
        self._sentences[key] = sentence
        self._unasked.append(sentence)

    def feed(self, key: Key, ids: Iterable[int], last: bool) -> None:
        """Add tokens of a sentence; unknown keys are ignored. No further ones follow the last.

        A token that is no code of the place that is due is left out.
        """
        sentence = self._sentences.get(key)
        if sentence is None:
            return
        first, size, codes = self._tokens.control(_CODES), len(self._codec.order), self._codec.codes
        for token in ids:
            place, code = divmod(token - first, codes)
            if place != len(sentence.codes):
                continue
            sentence.codes.append(code)
            if len(sentence.codes) == size:
                number = sentence.decoded + len(sentence.waiting)
                frame = self._codec.frame(sentence.codes, sentence.key_of_noise, number)
                sentence.waiting.append(frame)
                sentence.codes = []
        sentence.done = sentence.done or last

    def remove(self, key: Key) -> None:
        """Drop a sentence without further output. Unknown keys are ignored."""
        self._sentences.pop(key, None)
        self._unasked = [sentence for sentence in self._unasked if sentence.key != key]

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Ask for the tokens of new sentences, and decode the chunks that are due."""
        asked, self._unasked = self._unasked, []
        outputs = [StepOutput(sentence.key, generate=sentence.request) for sentence in asked]
        outputs += self._chunks.outputs(self._sentences.values(), _output)
        for output in outputs:
            if output.done or output.error is not None:
                self.remove(output.key)
        return outputs

    def check_integrity(self) -> None:
        """Raise RuntimeError if a request is due for a sentence that is gone."""
        if gone := [one.key for one in self._unasked if one.key not in self._sentences]:
            raise RuntimeError(f"requests are due for {len(gone)} sentences that are gone")


def _output(sentence: _Sentence, samples: Tensor, is_last: bool) -> StepOutput:
    tokens = len(sentence.request.prompt)
    return StepOutput(sentence.key, samples, done=is_last, tokens=tokens, frames=sentence.decoded)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Hold the ids of the tokens that are no text.

    first: of `<custom_token_0>`.
    """

    first: int
    end_of_turn: int

    @classmethod
    def of(cls, folder: Path, tokenizer: Any, codes: int) -> _Tokens:
        """Find the tokens. Raises ConfigError if there are not as many as the codec has codes."""
        first = tokenizer.convert_tokens_to_ids("<custom_token_0>")
        last = tokenizer.convert_tokens_to_ids(f"<custom_token_{_CODES + codes - 1}>")
        end = tokenizer.convert_tokens_to_ids("<|eot_id|>")
        if None in (first, last, end) or last - first != _CODES + codes - 1:
            raise ConfigError(
                f"model={str(folder)!r}: its tokenizer lacks <|eot_id|> or <custom_token_0> to "
                f"<custom_token_{_CODES + codes - 1}> in a row; give a checkpoint of Orpheus's layout and its SNAC"
            )
        return cls(first, end)

    def control(self, number: int) -> int:
        """Return the id of `<custom_token_NUMBER>`."""
        return self.first + number


def _sampling(folder: Path, greedy: bool, end: int) -> dict[str, Any]:
    """Return fields of `Sampling`: the checkpoint's generation settings, else Orpheus's own."""
    settings = dict(_SAMPLING)
    path = folder / "generation_config.json"
    if path.is_file():
        generation = GenerationConfig.from_pretrained(folder)
        for name in (*_SAMPLING, "top_k"):
            if (value := getattr(generation, name, None)) is not None:
                settings[name] = value
        if generation.do_sample is False:
            settings["temperature"] = 0.0
    if greedy:
        settings["temperature"] = 0.0
    if "top_k" in settings:
        settings["top_k"] = int(settings["top_k"])
    return {**settings, "stop_token_ids": [end]}
