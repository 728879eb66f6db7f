"""Compile grammars, and hold the grammar state of a reply.

llguidance does the parsing: an Earley parser over a lexer of derivatives, with a mask of the
vocabulary per step. Text that the grammar forces is not inserted as tokens: the model spells it as
it likes, a token at a time.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from motet_shared import messages
from motet_shared.errors import BadRequest, UnsupportedParameter

from .lark import describe, lark
from .token_spelling import Spelling

STEP_SECONDS = (
    2.0  # CPU time for the mask of one step; a slower grammar would hold up other streams
)
_LIMITS = LLParserLimits(verbose_errors=False)
_LOCATION = re.compile(r"^at 1\(\d+\): (?:failed to compile JSON schema: )?")
_QUOTED_GRAMMAR = re.compile(r"\n\s+\d+ \|.*", re.DOTALL)  # the quoted grammar, below the message
_UNKNOWN_KEYS = re.compile(r"Unimplemented keys: (\[.*\])")
_NO_EXTENSION = "NoExtension"  # llguidance's error where no token can follow
_MAX_SHOWN = 300


class GrammarState:
    """Hold the position of a reply in its grammar. Used by one thread at a time."""

    __slots__ = ("_constraint", "_matcher", "_problem", "_seconds")

    def __init__(self, matcher: LLMatcher, constraint: messages.Grammar, step_seconds: float):
        self._matcher = matcher
        self._constraint = constraint
        self._seconds = step_seconds
        self._problem = ""

    def fill(self, row_W: np.ndarray, stop_ids: Iterable[int]) -> None:
        """Set the bits (uint32) of allowed tokens, and of `stop_ids` where the reply may end.

        No bit is set where no token is allowed: `error` gives the reason.
        """
        began = time.thread_time()
        self._matcher.unsafe_compute_mask_ptr(row_W.ctypes.data, row_W.nbytes)
        if (seconds := time.thread_time() - began) > self._seconds:
            self._problem = (
                f"a step in it takes {seconds:.1f} s, at most {self._seconds:g} s are given to it"
            )
        if self._matcher.is_error() or self._problem:
            row_W[:] = 0
        elif self._matcher.is_accepting():
            for token in stop_ids:
                row_W[token >> 5] |= np.uint32(1 << (token & 31))

    def accept(self, tokens: Sequence[int]) -> bool:
        """Advance by some tokens; return True if all of them are in the grammar."""
        return self._matcher.try_consume_tokens(list(tokens)) == len(tokens)

    def copy(self) -> GrammarState:
        """Return an independent copy at the same position."""
        return GrammarState(self._matcher.deep_copy(), self._constraint, self._seconds)

    @property
    def failed(self) -> bool:
        """Return True if a step in this grammar took too long."""
        return bool(self._problem)

    @property
    def may_end(self) -> bool:
        """Return True if the reply so far is a complete sentence of the grammar."""
        return (
            not self.failed and not self._matcher.is_error() and bool(self._matcher.is_accepting())
        )

    @property
    def ended(self) -> bool:
        """Return True if the reply is complete and nothing can follow."""
        return self.may_end and bool(self._matcher.is_stopped())

    def error(self, place: str) -> BadRequest:
        """Return the error of a reply that no token can continue; `place` names the position."""
        message = _reason(self._matcher.get_error())
        if not message or message.startswith(_NO_EXTENSION):
            message = "no token of this model can follow"
        reason = self._problem or message
        return _refusal(self._constraint, f"{reason} {place}; simplify it")


class Grammar:
    """Compile a grammar, the starting point of all replies that are constrained by it."""

    def __init__(
        self,
        constraint: messages.Grammar,
        spelling: Spelling,
        *,
        step_seconds: float = STEP_SECONDS,
    ):
        """Raise BadRequest for what does not compile, no text satisfies, or cannot end."""
        self._constraint = constraint
        self._step_seconds = step_seconds
        self._matcher = LLMatcher(spelling.engine, lark(constraint), log_level=0, limits=_LIMITS)
        if self._matcher.is_error():
            raise _not_compiled(constraint, _reason(self._matcher.get_error()))
        first_W = np.zeros(mask_words(spelling.vocab), np.uint32)
        grammar_state = self.start()
        grammar_state.fill(first_W, ())
        if grammar_state.failed:
            raise grammar_state.error("at its beginning")
        if not first_W.any() and not grammar_state.may_end:
            raise _refusal(constraint, "no text that this model can write satisfies it; loosen it")

    def start(self, output: Sequence[int] = ()) -> GrammarState:
        """Return the state of a reply that begins with `output`, which was generated elsewhere.

        Raises BadRequest if `output` is not in the grammar.
        """
        grammar_state = GrammarState(
            self._matcher.deep_copy(), self._constraint, self._step_seconds
        )
        if not grammar_state.accept(output):
            raise BadRequest(
                "output: is no beginning of a sentence of `grammar`; send what it gave",
                param="output",
            )
        return grammar_state


def mask_words(vocab: int) -> int:
    """Return the number of 32-bit words in a mask of `vocab` tokens and the grammar's end token."""
    return vocab // 32 + 1


def _reason(error: str) -> str:
    """Return llguidance's message without its dumps of the grammar and of its own state."""
    plain = _QUOTED_GRAMMAR.sub("", error.partition("\n<state>")[0])
    plain = " ".join(_LOCATION.sub("", plain).split())
    return plain if len(plain) <= _MAX_SHOWN else plain[: _MAX_SHOWN - 3] + "..."


def _not_compiled(constraint: messages.Grammar, reason: str) -> BadRequest:
    if unknown := _UNKNOWN_KEYS.search(reason):
        keys = ", ".join(f"`{key}`" for key in json.loads(unknown[1]))
        message = f"{describe(constraint)} has {keys}, which cannot constrain a reply; rephrase it without"
        return UnsupportedParameter(message, param=constraint.param or None)
    return _refusal(constraint, f"{reason}; correct it")


def _refusal(constraint: messages.Grammar, reason: str) -> BadRequest:
    return BadRequest(f"{describe(constraint)}: {reason}", param=constraint.param or None)
