"""Build the pocket-asr model for training: Whisper, a phoneme head and an alignment loss."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    GenerationConfig,
    WhisperConfig,
    WhisperForConditionalGeneration,
    WhisperTokenizer,
)

from recipes.asr import tokenizer as names
from recipes.asr.batches import IGNORED, Batch
from recipes.asr.data import PHONEMES
from recipes.asr.recipe import Recipe


def build(recipe: Recipe, tokenizer: WhisperTokenizer) -> WhisperForConditionalGeneration:
    """Build a model whose initial weights depend on the seed alone."""
    torch.manual_seed(recipe.seed)
    end, start = (tokenizer.convert_tokens_to_ids(token) for token in (names.END, names.START))
    config = WhisperConfig(
        vocab_size=len(tokenizer),
        num_mel_bins=80,
        d_model=recipe.width,
        encoder_layers=recipe.encoder_layers,
        decoder_layers=recipe.decoder_layers,
        encoder_attention_heads=recipe.heads,
        decoder_attention_heads=recipe.heads,
        encoder_ffn_dim=recipe.feed_forward,
        decoder_ffn_dim=recipe.feed_forward,
        max_source_positions=recipe.positions,
        max_target_positions=recipe.max_tokens,
        init_std=0.03,
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=start,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = WhisperForConditionalGeneration(config)
    model.generation_config = build_generation_config(recipe, tokenizer)
    return model


def build_generation_config(recipe: Recipe, tokenizer: WhisperTokenizer) -> GenerationConfig:
    """Describe the special tokens for `generate`; the default language is English."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in names.SPECIALS}
    end = ids[names.END]
    return GenerationConfig(
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        decoder_start_token_id=ids[names.START],
        is_multilingual=True,
        lang_to_id={names.ENGLISH: ids[names.ENGLISH]},
        task_to_id={"transcribe": ids[names.TRANSCRIBE], "translate": ids[names.TRANSLATE]},
        no_timestamps_token_id=ids[names.NO_TIMESTAMPS],
        prev_sot_token_id=ids["<|startofprev|>"],
        motet_prompts=False,  # trained without prompts; a prompt makes it skip words
        alignment_heads=[list(head) for head in recipe.alignment_heads],
        max_initial_timestamp_index=round(names.WINDOW / names.STEP),
        return_timestamps=False,
        language="en",
        task="transcribe",
        max_length=recipe.max_tokens,
    )


class Losses(NamedTuple):
    """Hold mean losses: text per token, phonemes per position, alignment per token."""

    text: Tensor
    phonemes: Tensor
    alignment: Tensor


class WhisperWithHeads(nn.Module):
    """Train Whisper with a phoneme head and aligned cross-attention; both are left out of exports."""

    def __init__(self, recipe: Recipe, tokenizer: WhisperTokenizer) -> None:
        super().__init__()
        self.recipe = recipe
        self.whisper = build(recipe, tokenizer)
        self.whisper.set_attn_implementation(
            "eager"
        )  # faster than the fused kernel on a CPU in bfloat16
        self.phoneme_head = nn.Linear(recipe.width, len(PHONEMES))
        self.whisper.model.encoder.embed_positions.requires_grad_(False)
        self._attention_inputs: dict[int, tuple[Tensor, Tensor]] = {}
        for layer, _ in recipe.alignment_heads:
            self.whisper.model.decoder.layers[layer].encoder_attn.register_forward_hook(
                self._record_inputs, with_kwargs=True
            )

    def _record_inputs(
        self, module: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any], output: object
    ) -> None:
        queries = args[0] if args else kwargs["hidden_states"]
        self._attention_inputs[module.layer_idx] = (queries, kwargs["key_value_states"])

    def encode(self, features: Tensor) -> Tensor:
        """Return the encoder's output [B, T/2, width]; unlike transformers' it takes any even T."""
        encoder = self.whisper.model.encoder
        hidden = functional.gelu(encoder.conv1(features))
        hidden = functional.gelu(encoder.conv2(hidden)).transpose(1, 2)
        hidden = hidden + encoder.embed_positions.weight[: hidden.shape[1]]
        for layer in encoder.layers:
            hidden = layer(hidden, None)
        return encoder.layer_norm(hidden)

    def forward(self, batch: Batch) -> Losses:
        """Return the losses of a batch."""
        encoded = self.encode(batch.features)
        decoded = self.whisper.model.decoder(
            input_ids=batch.tokens, encoder_hidden_states=encoded, use_cache=False
        )
        logits = self.whisper.proj_out(decoded.last_hidden_state)
        return Losses(
            text=functional.cross_entropy(
                logits.flatten(0, 1).float(), batch.labels.flatten(), ignore_index=IGNORED
            ),
            phonemes=functional.cross_entropy(
                self.phoneme_head(encoded).flatten(0, 1).float(), batch.phonemes.flatten()
            ),
            alignment=self._alignment(batch.word_frames),
        )

    def _alignment(self, word_frames: Tensor) -> Tensor:
        """Return the negative log of the attention that falls on the frames of the word."""
        written = word_frames.any(-1)
        losses = []
        for layer, head in self.recipe.alignment_heads:
            attention = self.whisper.model.decoder.layers[layer].encoder_attn
            queries, encoded = self._attention_inputs.pop(layer)
            part = slice(head * attention.head_dim, (head + 1) * attention.head_dim)
            query = functional.linear(
                queries, attention.q_proj.weight[part], attention.q_proj.bias[part]
            )
            key = functional.linear(encoded, attention.k_proj.weight[part])
            weights = ((query * attention.scaling) @ key.mT).float().softmax(-1)
            missed = -torch.log((weights * word_frames).sum(-1) + 1e-4)
            losses.append((missed * written).sum() / written.sum())  # no indexing: it waits
        return torch.stack(losses).mean()
