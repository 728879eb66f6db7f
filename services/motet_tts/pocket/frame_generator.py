"""Generate pocket-tts's code frames from phonemes, autoregressively.

A Qwen3 decoder reads the phonemes and then its own frames. A pointer advances along the phonemes:
with each frame the model predicts how many it has passed, so that no word is skipped or repeated,
and word times need no further computation. A small head predicts the codes of a frame one codebook
after another.

A frame is a row of integers: its codes, then the pointer's position for the next frame: how many
frames it has been there, its place, and the phonemes there and at the next two places.

Shapes: B sentences, P phonemes, N frames, K codebooks, E hidden, F = K + 5 columns of a frame.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3Config, Qwen3Model

from motet_kernels.spans import upload

from .config import PocketConfig
from .errors import PocketError

LONGEST = 24  # frames at one phoneme that are distinguished


@dataclass(slots=True)
class Pointer:
    """Track the position of a sentence in its phonemes.

    place: index of the phoneme that is being spoken.
    since: frames it has been spoken for.
    waiting: probability that it is not over yet.
    """

    phonemes: list[int]
    place: int = 0
    since: int = 0
    waiting: float = 1.0

    @property
    def done(self) -> bool:
        """Return True if all phonemes are spoken."""
        return self.place >= len(self.phonemes)

    def move(self, count: int) -> None:
        """Pass `count` phonemes in the next frame."""
        self.place, self.since = (self.place + count, 0) if count else (self.place, self.since + 1)

    def step(self, chances: list[float]) -> None:
        """Move past a phoneme once it is more likely over than not: its median duration.

        `chances` are the probabilities of passing 0, 1, 2, … phonemes.
        """
        self.waiting *= chances[0]
        if self.waiting >= 0.5 and self.since < 2 * LONGEST:  # no phoneme lasts two seconds
            self.move(0)
            return
        self.waiting = 1.0
        self.move(max(range(1, len(chances)), key=chances.__getitem__))

    def columns(self, end: int) -> list[int]:
        """Return the pointer's columns of a frame; `end` stands for phonemes after the last."""
        next_phonemes = [*self.phonemes[self.place : self.place + 3], end, end, end][:3]
        return [min(self.since, LONGEST - 1), self.place, *next_phonemes]


class CodebookDecoder(nn.Module):
    """Predict the codes of one frame from its hidden state, one codebook after another."""

    def __init__(self, config: PocketConfig) -> None:
        super().__init__()
        width = config.depth
        self.enter = nn.Linear(config.hidden, width)
        self.said = nn.ModuleList(
            nn.Embedding(config.codes, width) for _ in range(config.codebooks - 1)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(config.codebooks))
        self.wide = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(config.codebooks))
        self.out = nn.ModuleList(
            nn.Linear(2 * width, config.codes) for _ in range(config.codebooks)
        )

    def logits(self, sum_BE: Tensor, book: int) -> Tensor:
        output: Tensor = self.out[book](functional.gelu(self.wide[book](self.norms[book](sum_BE))))
        return output

    def forward(self, hidden_BE: Tensor, codes_BK: Tensor) -> list[Tensor]:
        """Return logits `[B, V]` of every codebook, each given the codes before it."""
        total = self.enter(hidden_BE)
        logits = [self.logits(total, 0)]
        for book, embedding in enumerate(self.said, start=1):
            total = total + embedding(codes_BK[:, book - 1])
            logits.append(self.logits(total, book))
        return logits

    @torch.inference_mode()
    def draw(
        self, hidden_BE: Tensor, *, temperature: float = 0.0, gumbel_BKV: Tensor | None = None
    ) -> Tensor:
        """Return codes `[B, K]`: the likeliest, or with noise a sample at this temperature."""
        total, codes = self.enter(hidden_BE), []
        for book in range(len(self.out)):
            scores = self.logits(total, book)
            if temperature > 0 and gumbel_BKV is not None:
                scores = scores / temperature + gumbel_BKV[:, book]
            codes.append(scores.argmax(-1))
            if book < len(self.said):
                total = total + self.said[book](codes[-1])
        return torch.stack(codes, dim=-1)


class FrameGenerator(nn.Module):
    """Combine the Qwen3 decoder with its embeddings and heads."""

    def __init__(self, config: PocketConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden
        self.end = len(config.phonemes)
        self.voices = nn.Embedding(len(config.voices), hidden)
        self.rate = nn.Linear(1, hidden)
        self.phonemes = nn.Embedding(self.end + 1, hidden)
        self.places = nn.Embedding(config.max_phonemes, hidden)
        self.codes = nn.ModuleList(
            nn.Embedding(config.codes, hidden) for _ in range(config.codebooks)
        )
        self.coming = nn.ModuleList(nn.Embedding(self.end + 1, hidden) for _ in range(3))
        self.since = nn.Embedding(LONGEST, hidden)
        self.start = nn.Parameter(torch.zeros(hidden))
        self.backbone = Qwen3Model(
            Qwen3Config(
                vocab_size=1,
                hidden_size=hidden,
                intermediate_size=config.feed_forward,
                num_hidden_layers=config.layers,
                num_attention_heads=config.heads,
                num_key_value_heads=config.kv_heads,
                head_dim=hidden // config.heads,
                max_position_embeddings=config.max_positions,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
                pad_token_id=None,
            )
        )
        self.depth = CodebookDecoder(config)
        self.advance = nn.Linear(hidden, config.advances)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.05)

    def prompt(self, phonemes: list[int], voice: int, rate: float) -> Tensor:
        """Return `[P + 2, E]`: voice, phonemes and start, with the pointer at phoneme 0."""
        return torch.cat([self.read(phonemes, voice, rate), self.embed(self.first(phonemes)[None])])

    def read(self, phonemes: list[int], voice: int, rate: float) -> Tensor:
        """Return the prompt without its start, `[P + 1, E]`. Raises PocketError if too long."""
        if len(phonemes) > self.config.max_phonemes:
            raise PocketError(
                f"the sentence has {len(phonemes)} phonemes, limit {self.config.max_phonemes}: shorten it",
                param="phonemes",
            )
        device = self.start.device
        voices, rates = torch.tensor([voice]), torch.tensor([rate], dtype=self.start.dtype)
        numbers = upload(torch.tensor(phonemes, dtype=torch.long), device)
        return torch.cat(
            [
                self.embed_style(upload(voices, device), upload(rates, device)),
                self.embed_phonemes(numbers, torch.arange(len(phonemes), device=device)),
            ]
        )

    def embed_style(self, voices_B: Tensor, rates_B: Tensor) -> Tensor:
        """Embed voices and speaking rates, `[B, E]`."""
        output: Tensor = self.voices(voices_B) + self.rate(rates_B.log2()[:, None])
        return output

    def embed_phonemes(self, phonemes: Tensor, places: Tensor) -> Tensor:
        """Embed phonemes and their places in the sentence; adds a dimension E."""
        output: Tensor = self.phonemes(phonemes) + self.places(places)
        return output

    def first(self, phonemes: list[int]) -> Tensor:
        """Return the row `[F]` before the first frame; it has no codes."""
        row = [*[-1] * self.config.codebooks, *Pointer(phonemes).columns(self.end)]
        return upload(torch.tensor(row), self.start.device)

    def embed(self, frames_BF: Tensor) -> Tensor:
        """Embed frames `[…, F]` as the model's inputs `[…, E]`."""
        books = self.config.codebooks
        codes, since, place, next_phonemes = frames_BF.split([books, 1, 1, 3], dim=-1)
        total = self.since(since[..., 0]) + self.places(
            place[..., 0].clamp(max=self.config.max_phonemes - 1)
        )
        for index, table in enumerate(self.coming):
            total = total + table(next_phonemes[..., index])
        begun = (codes[..., :1] >= 0).to(total.dtype)
        code_vectors = torch.stack(
            [table(codes[..., k].clamp(min=0)) for k, table in enumerate(self.codes)]
        ).sum(0)
        output: Tensor = total + begun * code_vectors + (1 - begun) * self.start
        return output

    @torch.inference_mode()
    def draw(
        self,
        hidden_BE: Tensor,
        pointers: list[Pointer],
        *,
        temperature: float = 0.0,
        gumbel_BKV: Tensor | None = None,
    ) -> Tensor:
        """Return the next frames `[B, F]` and move the pointers.

        A sentence whose pointer is done has received its last frame.
        """
        codes_BK = self.depth.draw(hidden_BE, temperature=temperature, gumbel_BKV=gumbel_BKV)
        for pointer, chances in zip(
            pointers, self.advance(hidden_BE).softmax(-1).tolist(), strict=True
        ):
            pointer.step(chances)
        columns_BF = torch.tensor([pointer.columns(self.end) for pointer in pointers])
        return torch.cat([codes_BK, upload(columns_BF, codes_BK.device)], dim=-1)
