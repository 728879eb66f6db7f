"""Run Bark: three transformers one after the other (semantic, coarse, fine), and EnCodec.

The fine one looks at the whole sentence, so no sample is ready before its last coarse code. A step
advances each sentence by one token, or by its fine codes and samples. Source: transformers'
`BarkModel.generate`, which is the reference.

Shapes: P positions, N tokens or frames, V tokens of a vocabulary, K codebooks.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer, BarkModel, DynamicCache
from transformers.models.bark.generation_configuration_bark import (
    BarkCoarseGenerationConfig,
    BarkFineGenerationConfig,
    BarkSemanticGenerationConfig,
)

from motet_kernels.spans import upload
from motet_tts.engine.failures import failure
from motet_tts.engine.utterance import Key, StepOutput, Utterance

from .codec_lm import room_for
from .noise import Noise, hash_numbers
from .sampling import CodeSampling, choose

log = logging.getLogger(__name__)

_DEFAULT_VOICE = "default"  # the model chooses one
_PROMPTS = ("semantic_prompt", "coarse_prompt", "fine_prompt")

_Voice = dict[str, Tensor]


@dataclass(slots=True)
class _Sentence:
    """Hold the state of one sentence.

    limit: most semantic tokens.
    semantic, coarse: tokens so far; coarse ones as transformers keeps them.
    due: coarse tokens that the semantic ones call for; -1 until those are complete.
    window: coarse tokens so far of the current window.
    cache, logits: of the transformer that is at work.
    """

    key: Key
    utterance: Utterance
    prompt: Tensor
    tokens: int
    limit: int
    voice: _Voice | None
    semantic: list[int] = field(default_factory=list)
    coarse: list[int] = field(default_factory=list)
    due: int = -1
    window: int = 0
    cache: Any = None
    logits: Tensor | None = None


class Bark:
    """Run a checkpoint folder of Bark, whose voices are those of speaker_embeddings_path.json."""

    rates = (1.0, 1.0)
    clones = False
    instructs = False

    def __init__(self, folder: Path, *, device: torch.device, dtype: torch.dtype, greedy: bool):
        self.device, self.dtype = device, dtype
        self._model: Any = (
            BarkModel.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
            .eval()
            .to(device)
        )
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        generation = self._model.generation_config
        self._semantic = BarkSemanticGenerationConfig(**generation.semantic_config)
        self._coarse = BarkCoarseGenerationConfig(**generation.coarse_acoustics_config)
        self._fine = BarkFineGenerationConfig(**generation.fine_acoustics_config)
        if greedy:
            self._fine.temperature = None
        self._semantic_sampling = CodeSampling.of(self._semantic, greedy)
        self._coarse_sampling = CodeSampling.of(self._coarse, greedy)
        self._codes = int(generation.codebook_size)
        coarse = self._coarse
        self._ratio = (
            coarse.coarse_rate_hz / self._semantic.semantic_rate_hz * coarse.n_coarse_codebooks
        )
        self.sample_rate = int(generation.sample_rate)
        self._voices = _voices(folder, self._semantic.semantic_vocab_size, self._codes)
        self.voices = (_DEFAULT_VOICE, *self._voices)
        self._sentences: dict[Key, _Sentence] = {}

    def __len__(self) -> int:
        return len(self._sentences)

    @property
    def has_work(self) -> bool:
        """Return True while there are sentences."""
        return bool(self._sentences)

    @torch.inference_mode()
    def add(self, key: Key, utterance: Utterance) -> None:
        """Add a sentence to the next step. Raises BadRequest if it is too long."""
        settings = self._semantic
        size = settings.max_input_semantic_length
        ids = list(self._tokenizer(utterance.text, add_special_tokens=False)["input_ids"])
        room_for(len(ids), size)
        padding = [settings.text_pad_token] * (size - len(ids))
        text = [token + settings.text_encoding_offset for token in ids] + padding
        voice = self._voices.get(utterance.voice)
        history = [] if voice is None else voice["semantic_prompt"][-size:].tolist()
        history += [settings.semantic_pad_token] * (size - len(history))
        embed = self._model.semantic.input_embeds_layer
        rows = upload(torch.tensor([text, history]), self.device)
        last = upload(torch.tensor([settings.semantic_infer_token]), self.device)
        prompt = torch.cat([embed(rows).sum(0), embed(last)])
        limit = min(utterance.max_frames or settings.max_new_tokens, settings.max_new_tokens)
        self._sentences[key] = _Sentence(key, utterance, prompt, len(ids), limit, voice)

    def remove(self, key: Key) -> None:
        """Drop a sentence without further output. Unknown keys are ignored."""
        self._sentences.pop(key, None)

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Advance each sentence; return the samples of those that are complete."""
        outputs = []
        for sentence in list(self._sentences.values()):
            try:
                output = self._advance(sentence)
            except Exception as error:
                output = StepOutput(sentence.key, error=failure(error, self.device))
            if output is not None:
                outputs.append(output)
                self.remove(sentence.key)
        return outputs

    def check_integrity(self) -> None:
        """Raise RuntimeError if a sentence has more coarse tokens than are due."""
        if any(0 <= one.due < len(one.coarse) for one in self._sentences.values()):
            raise RuntimeError("a sentence has more coarse tokens than its semantic ones call for")

    def _advance(self, sentence: _Sentence) -> StepOutput | None:
        if sentence.due < 0:
            self._add_semantic(sentence)
            return None
        if len(sentence.coarse) < sentence.due:
            self._add_coarse(sentence)
            return None
        frames = sentence.due // self._coarse.n_coarse_codebooks
        samples = self._samples(sentence) if frames else torch.zeros(0)
        return StepOutput(sentence.key, samples, done=True, tokens=sentence.tokens, frames=frames)

    def _chosen(self, sentence: _Sentence, scores_V: Tensor, sampling: CodeSampling) -> int:
        """Choose a token; its noise is that of its number among all tokens of the sentence."""
        number = len(sentence.semantic) + len(sentence.coarse)
        noise = Noise(sentence.utterance.seed, sentence.utterance.index, number)
        gumbel = None
        if sampling.random:
            gumbel = upload(noise.gumbel(1, len(scores_V)), self.device)
        return int(choose(scores_V[None], sampling, gumbel))

    # ----------------------------------------------------------------------------------- semantic
    def _add_semantic(self, sentence: _Sentence) -> None:
        model, settings = self._model.semantic, self._semantic
        if sentence.cache is None:
            sentence.cache = DynamicCache(config=model.config)
            given = {"inputs_embeds": sentence.prompt[None]}
        else:
            given = {"input_ids": self._ids(sentence.semantic[-1:])}
        scores_V = self._scores(model, sentence, given)
        end, pad = settings.eos_token_id, settings.semantic_pad_token
        scores_V[settings.semantic_vocab_size : pad] = -torch.inf
        scores_V[pad + 1 :] = -torch.inf
        if settings.min_eos_p and scores_V.softmax(-1)[end] > settings.min_eos_p:
            token = end
        else:
            token = self._chosen(sentence, scores_V, self._semantic_sampling)
        sentence.semantic.append(token)
        if token == end or len(sentence.semantic) >= sentence.limit:
            self._finish_semantic(sentence)

    def _finish_semantic(self, sentence: _Sentence) -> None:
        """Count the coarse tokens that are due, as transformers rounds."""
        pad, coarse = self._semantic.semantic_pad_token, self._coarse
        spoken = sum(token != pad for token in sentence.semantic)
        books = coarse.n_coarse_codebooks
        frames = math.floor(np.float32(spoken) * np.float32(self._ratio) / np.float32(books))
        sentence.due = frames * books
        sentence.semantic = [
            coarse.coarse_semantic_pad_token if token == pad else token
            for token in sentence.semantic
        ]
        sentence.cache = None

    # ------------------------------------------------------------------------------------- coarse
    def _add_coarse(self, sentence: _Sentence) -> None:
        model, books = self._model.coarse_acoustics, self._coarse.n_coarse_codebooks
        if sentence.cache is None:
            sentence.cache, sentence.window = DynamicCache(config=model.config), 0
            given = {"input_ids": self._ids(self._coarse_prompt(sentence))}
        else:
            given = {"input_ids": self._ids(sentence.coarse[-1:])}
        scores_V = self._scores(model, sentence, given)
        first = self._semantic.semantic_vocab_size
        if sentence.window % books == 0:
            scores_V[:first] = -torch.inf
            scores_V[first + self._codes :] = -torch.inf
        else:
            scores_V[: first + self._codes] = -torch.inf
        sentence.coarse.append(self._chosen(sentence, scores_V, self._coarse_sampling))
        sentence.window += 1
        if sentence.window == self._coarse.sliding_window_len:
            sentence.cache = None

    def _coarse_prompt(self, sentence: _Sentence) -> list[int]:
        """Return the prompt of a window: semantic tokens around it, and coarse ones before it."""
        settings = self._coarse
        before_semantic, before_coarse = self._histories(sentence.voice)
        longest = math.floor(settings.max_coarse_history / self._ratio)
        at = len(before_semantic) + round(len(sentence.coarse) / self._ratio)
        size = settings.max_coarse_input_length
        near = [*before_semantic, *sentence.semantic][max(0, at - longest) :][:size]
        near += [settings.coarse_semantic_pad_token] * (size - len(near))
        known = [*before_coarse, *sentence.coarse][-settings.max_coarse_history :]
        return [*near, settings.coarse_infer_token, *known]

    def _histories(self, voice: _Voice | None) -> tuple[list[int], list[int]]:
        """Return the semantic and coarse tokens of a voice that belong to the same time."""
        if voice is None:
            return [], []
        semantic_1N, coarse_1N = self._model.coarse_acoustics.preprocess_histories(
            max_coarse_history=self._coarse.max_coarse_history,
            semantic_to_coarse_ratio=self._ratio,
            batch_size=1,
            semantic_generation_config=self._semantic,
            codebook_size=self._codes,
            history_prompt=voice,
        )
        return semantic_1N[0].tolist(), coarse_1N[0].tolist()

    # --------------------------------------------------------------------------------------- fine
    def _samples(self, sentence: _Sentence) -> Tensor:
        """Return the samples of all coarse tokens; the fine codes' noise is the sentence's."""
        voice = sentence.voice
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(hash_numbers(sentence.utterance.seed, sentence.utterance.index))
            fine_1KN = self._model.fine_acoustics.generate(
                self._ids(sentence.coarse),
                semantic_generation_config=self._semantic,
                coarse_generation_config=self._coarse,
                fine_generation_config=self._fine,
                codebook_size=self._codes,
                history_prompt=voice,
            )
        audio_1N: Tensor = self._model.codec_decode(fine_1KN)
        return audio_1N[0].float().cpu()

    def _ids(self, tokens: list[int]) -> Tensor:
        return upload(torch.tensor([tokens]), self.device)

    def _scores(self, model: Any, sentence: _Sentence, given: dict[str, Tensor]) -> Tensor:
        output = model(**given, past_key_values=sentence.cache, use_cache=True)
        scores_V: Tensor = output.logits[0, -1].float().clone()
        return scores_V


def _voices(folder: Path, semantic: int, codes: int) -> dict[str, _Voice]:
    """Read the voices that speaker_embeddings_path.json names; files outside the folder are not read."""
    path = folder / "speaker_embeddings_path.json"
    named = json.loads(path.read_text()) if path.is_file() else {}
    voices = {}
    for name, files in named.items():
        if not isinstance(files, dict):
            continue
        arrays = [_array(folder, files.get(part)) for part in _PROMPTS]
        limits = (semantic, codes, codes)
        if any(
            array is None
            or array.ndim != dims
            or array.size == 0
            or not 0 <= array.min() <= array.max() < limit
            for array, dims, limit in zip(arrays, (1, 2, 2), limits, strict=True)
        ):
            log.warning("voice %s is ignored: its prompts are not tokens of the model", name)
            continue
        voices[str(name)] = {
            part: torch.from_numpy(array.astype(np.int64))
            for part, array in zip(_PROMPTS, arrays, strict=True)
            if array is not None
        }
    return voices


def _array(folder: Path, name: object) -> np.ndarray[Any, Any] | None:
    if not isinstance(name, str):
        return None
    path = (folder / name).resolve()
    if folder.resolve() not in path.parents or not path.is_file():
        return None
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError):
        return None
    return array if isinstance(array, np.ndarray) and array.dtype.kind in "iu" else None
