"""Encode prompts that ask for the text between a prefix and a suffix (fill in the middle).

Code models are trained on such prompts with three control tokens of their own. Their names are
those of the released tokenizers: CodeLlama, StarCoder, Granite, SantaCoder, Qwen-Coder, CodeGemma,
DeepSeek-Coder, GLM-4 and Codestral.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from motet_shared.errors import UnsupportedParameter

# Tokens before the prefix, before the suffix, and before the middle, which is the completion.
_PREFIX_FIRST = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
_SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")
# Tokens that end the middle, or a file, besides the tokens that end every reply.
_ENDS = (
    "▁<EOT>",
    "<|fim_pad|>",
    "<|file_sep|>",
    "<|file_separator|>",
    "<|repo_name|>",
    "<fim_pad>",
    "<fim-pad>",
    "<file_sep>",
    "<|endoftext|>",
)


@dataclass(frozen=True, slots=True)
class Infill:
    """Control tokens of a vocabulary: `prefix`, `suffix`, `middle` (None: the suffix comes first).

    ends: tokens that end a completion.
    """

    prefix: int
    suffix: int
    middle: int | None
    ends: frozenset[int]

    @classmethod
    def of(cls, backend: Any) -> Infill | None:
        """Return the control tokens of a tokenizer, or None if it has none."""
        ids = backend.token_to_id
        ends = frozenset(i for i in map(ids, _ENDS) if i is not None)
        for names in _PREFIX_FIRST:
            prefix, suffix, middle = map(ids, names)
            if prefix is not None and suffix is not None and middle is not None:
                return cls(prefix, suffix, middle, ends | {prefix, suffix, middle})
        suffix, prefix = map(ids, _SUFFIX_FIRST)
        if suffix is None or prefix is None:
            return None
        return cls(prefix, suffix, None, ends | {prefix, suffix})

    def encode(self, backend: Any, prefix: str, suffix: str) -> list[int]:
        """Return the ids of a prompt, with the beginning-of-text token that the model wants."""
        start = list(backend.encode("").ids)
        before = list(backend.encode(prefix, add_special_tokens=False).ids)
        after = list(backend.encode(suffix, add_special_tokens=False).ids)
        if self.middle is None:
            return [*start, self.suffix, *after, self.prefix, *before]
        return [*start, self.prefix, *before, self.suffix, *after, self.middle]


def no_infill(model: str) -> UnsupportedParameter:
    """Return the error for a suffix where the model's tokenizer has no such tokens."""
    return UnsupportedParameter(
        f"suffix: the tokenizer of {model!r} has no tokens to fill in the middle; omit it, or choose a "
        "code model",
        param="suffix",
    )
