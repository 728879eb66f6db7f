"""Make the speech of a pool: clean utterances of scaled throats, without rooms and noise.

A clip is a pure function of (seed, index). Worker processes write shards of clips ahead of the
reader, which deletes them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray

from recipes.asr import data as asr_data
from recipes.asr.data import Clip, phoneme_label, token_spans, word_times
from recipes.asr.recipe import PoolRecipe
from recipes.asr.shards import is_suspended
from recipes.asr.tokenizer import WINDOW, WhisperTokenizer
from recipes.speech.noise import RATE, no_speech, resample
from recipes.speech.sentences import training_utterance
from recipes.training.held_out_seeds import check_training_seed

MARKS = 100  # phoneme labels per second
UNREAD = 4  # shards per worker that wait to be read


@dataclass(frozen=True, kw_only=True)
class SpeechShard:
    """Hold C clips, their arrays concatenated or padded.

    samples: int16 at 16 kHz, of all clips in order; lengths: [C] samples. tokens: [C, L], padded
    with -1. spans: [C, L, 2] milliseconds of each token's word. phonemes: [C, WINDOW * MARKS].
    """

    samples: NDArray[np.int16]
    lengths: NDArray[np.int64]
    tokens: NDArray[np.int16]
    spans: NDArray[np.int16]
    phonemes: NDArray[np.uint8]


def longest(recipe: PoolRecipe) -> int:
    """Return the samples of the longest speech that fits the window with the silence around it."""
    silence = recipe.conditions.before[1] + recipe.conditions.after[1]
    return int((WINDOW - silence) * RATE) - 1


def training_speech(recipe: PoolRecipe, index: int) -> Clip:
    """Return the clean speech number `index`. Raises RecipeError for a held-out seed."""
    check_training_seed(recipe.seed)
    rng = Random(f"{recipe.seed}/speech/{index}")
    if rng.random() < recipe.no_speech_share:
        return Clip(wave=no_speech(np.random.default_rng((recipe.seed, index))), text="")
    while True:
        sentence = training_utterance(
            rng, general_share=recipe.general_share, long_share=recipe.long_share
        )
        speech, voice = asr_data.draw_speech(recipe, rng, sentence.text)
        wave = resample(speech.samples, speech.rate)
        if not 0 < len(wave) <= longest(recipe):
            continue
        return Clip(
            wave=wave,
            text=sentence.text,
            words=tuple(word_times(sentence.text, speech)),
            phonemes=speech.phonemes,
            category=sentence.category,
            voice=voice,
        )


def pack(
    clips: Sequence[Clip], tokenizer: WhisperTokenizer, *, max_tokens: int = 128
) -> SpeechShard:
    """Convert clips to their stored form; leaves out those of too many tokens."""
    waves, rows, spans, phonemes = [], [], [], []
    for clip in clips:
        ids, times = token_spans(clip, tokenizer)
        if len(ids) > max_tokens - 5:
            continue
        row, span = np.full(max_tokens, -1, np.int16), np.zeros((max_tokens, 2), np.int16)
        row[: len(ids)] = ids
        span[: len(ids)] = np.round(np.array(times).reshape(-1, 2) * 1000)
        rows.append(row)
        spans.append(span)
        phonemes.append(_phonemes(clip))
        loudest = np.abs(clip.wave).max() + 1e-9
        waves.append(np.round(clip.wave / loudest * 32000).astype(np.int16))
    return SpeechShard(
        samples=np.concatenate(waves),
        lengths=np.array([len(wave) for wave in waves], np.int64),
        tokens=np.stack(rows),
        spans=np.stack(spans),
        phonemes=np.stack(phonemes),
    )


def _phonemes(clip: Clip) -> NDArray[np.uint8]:
    """Return the phoneme labels of a whole window, MARKS per second; after the clip, silence."""
    labels = np.zeros(WINDOW * MARKS, np.uint8)
    places = [round(mark.second * MARKS) for mark in clip.phonemes]
    ends = [*places[1:], round(len(clip.wave) / RATE * MARKS)]
    for start, end, mark in zip(places, ends, clip.phonemes, strict=False):
        labels[start:end] = phoneme_label(mark.phoneme)
    return labels


def write(path: Path, shard: SpeechShard) -> None:
    """Write a shard to one file."""
    temporary = path.with_suffix(f".{os.getpid()}")
    with temporary.open("wb") as file:
        np.savez(file, **vars(shard))
    os.replace(temporary, path)


def read(path: Path) -> SpeechShard:
    """Read the shard of a file."""
    with np.load(path) as file:
        return SpeechShard(**{name: file[name] for name in file.files})


def start_makers(
    recipe: PoolRecipe, tokenizer: WhisperTokenizer, folder: Path, count: int
) -> list[BaseProcess]:
    """Empty `folder` and start processes that write shards into it; they end with this process."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    context = get_context("spawn")
    makers: list[BaseProcess] = [
        context.Process(
            target=make_shards, args=(recipe, tokenizer, folder, worker, count), daemon=True
        )
        for worker in range(count)
    ]
    for maker in makers:
        maker.start()
    return makers


def make_shards(
    recipe: PoolRecipe, tokenizer: WhisperTokenizer, folder: Path, worker: int, workers: int
) -> None:
    """Write every `workers`th shard until the parent process ends."""
    import torch

    torch.set_num_threads(1)
    parent, shard = os.getppid(), worker
    while os.getppid() == parent:
        if len(list(folder.glob("*.npz"))) >= UNREAD * workers or is_suspended(parent):
            time.sleep(0.1)
            continue
        first = shard * recipe.shard
        clips = [training_speech(recipe, index) for index in range(first, first + recipe.shard)]
        write(
            folder / f"{recipe.seed}-{shard:05d}.npz",
            pack(clips, tokenizer, max_tokens=recipe.max_tokens),
        )
        shard += workers
