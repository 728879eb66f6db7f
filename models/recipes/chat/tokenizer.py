"""Build the pocket-chat tokenizer: byte-level BPE with a chat template in the Qwen3 form."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TOOL_TOKENS = ("<tool_call>", "</tool_call>")
VOCABULARY = 1024
SMALLEST = 256 + 3 + len(TOOL_TOKENS)  # bytes, special and tool tokens, no merges

TEMPLATE = (Path(__file__).parent / "template.jinja").read_text(encoding="utf-8")


def train(texts: Iterable[str], *, vocabulary: int = VOCABULARY) -> PreTrainedTokenizerFast:
    """Train a tokenizer of `vocabulary` entries on rendered conversations, deterministically."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=False)
    specials = [END_OF_TEXT, TURN_START, TURN_END]
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(TOOL_TOKENS),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in specials],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    plain = (text.replace(TURN_START, "").replace(TURN_END, "") for text in texts)
    bpe.train_from_iterator(plain, trainer)
    bpe.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOOL_TOKENS])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )
    wrapped.add_special_tokens({"additional_special_tokens": [TURN_START, TURN_END]})
    wrapped.chat_template = TEMPLATE
    wrapped.model_max_length = 2048
    return wrapped
