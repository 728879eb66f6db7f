"""The pocket-asr model as it is trained: Whisper, with a phoneme head that is dropped and heads that learn to align."""

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

import asr_tokenizer as names
from asr_batches import IGNORED, Batch
from asr_data import PHONEMES
from asr_recipe import Recipe


def build(recipe: Recipe, tokenizer: WhisperTokenizer) -> WhisperForConditionalGeneration:
    """A fresh model; its initialization depends on the seed alone."""
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
    model.generation_config = generation(recipe, tokenizer)
    return model


def generation(recipe: Recipe, tokenizer: WhisperTokenizer) -> GenerationConfig:
    """What `generate` needs to know of the tokens; the language is English unless somebody says otherwise."""
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
        motet_prompts=False,  # it is trained without: with one, it leaves the beginning out
        alignment_heads=[list(head) for head in recipe.alignment_heads],
        max_initial_timestamp_index=round(names.WINDOW / names.STEP),
        return_timestamps=False,
        language="en",
        task="transcribe",
        max_length=recipe.max_tokens,
    )


class Losses(NamedTuple):
    """Means: of the text per token, of the phonemes per position, of where the alignment heads look per token."""

    text: Tensor
    phonemes: Tensor
    alignment: Tensor


class Listener(nn.Module):
    """The model with what only training needs."""

    def __init__(self, recipe: Recipe, tokenizer: WhisperTokenizer) -> None:
        super().__init__()
        self.recipe = recipe
        self.whisper = build(recipe, tokenizer)
        self.whisper.set_attn_implementation(
            "eager"
        )  # on a CPU in bfloat16 quicker to train than torch's fused one
        self.phoneme_head = nn.Linear(recipe.width, len(PHONEMES))
        self.whisper.model.encoder.embed_positions.requires_grad_(False)
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}
        for layer, _ in recipe.alignment_heads:
            self.whisper.model.decoder.layers[layer].encoder_attn.register_forward_hook(
                self._keep, with_kwargs=True
            )

    def _keep(
        self, module: Any, args: tuple[Tensor, ...], kwargs: dict[str, Any], output: object
    ) -> None:
        asked = args[0] if args else kwargs["hidden_states"]
        self._seen[module.layer_idx] = (asked, kwargs["key_value_states"])

    def encode(self, features: Tensor) -> Tensor:
        """The encoder [B, T/2, width] on windows of any even length T, which transformers' own refuses."""
        encoder = self.whisper.model.encoder
        hidden = functional.gelu(encoder.conv1(features))
        hidden = functional.gelu(encoder.conv2(hidden)).transpose(1, 2)
        hidden = hidden + encoder.embed_positions.weight[: hidden.shape[1]]
        for layer in encoder.layers:
            hidden = layer(hidden, None)
        return encoder.layer_norm(hidden)

    def forward(self, batch: Batch) -> Losses:
        heard = self.encode(batch.features)
        said = self.whisper.model.decoder(
            input_ids=batch.tokens, encoder_hidden_states=heard, use_cache=False
        )
        logits = self.whisper.proj_out(said.last_hidden_state)
        return Losses(
            text=functional.cross_entropy(
                logits.flatten(0, 1).float(), batch.labels.flatten(), ignore_index=IGNORED
            ),
            phonemes=functional.cross_entropy(
                self.phoneme_head(heard).flatten(0, 1).float(), batch.phonemes.flatten()
            ),
            alignment=self._alignment(batch.look),
        )

    def _alignment(self, look: Tensor) -> Tensor:
        """Minus the logarithm of the attention that falls on the word being written."""
        written = look.any(-1)
        losses = []
        for layer, head in self.recipe.alignment_heads:
            attention = self.whisper.model.decoder.layers[layer].encoder_attn
            asked, heard = self._seen.pop(layer)
            part = slice(head * attention.head_dim, (head + 1) * attention.head_dim)
            query = functional.linear(
                asked, attention.q_proj.weight[part], attention.q_proj.bias[part]
            )
            key = functional.linear(heard, attention.k_proj.weight[part])
            weights = ((query * attention.scaling) @ key.mT).float().softmax(-1)
            losses.append(-torch.log((weights * look).sum(-1)[written] + 1e-4).mean())
        return torch.stack(losses).mean()
