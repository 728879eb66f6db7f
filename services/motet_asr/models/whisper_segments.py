"""Turn Whisper's tokens, timestamps among them, into text with times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from motet_asr.engine.request import Pass, TimedSegment, WindowResult, Word
from motet_asr.transcription.align import UNSPACED, group_tokens, spread, token_ends

from .rules import WhisperRules, text_compression


class WhisperSegments:
    """Build segments from passes.

    step: seconds per timestamp and encoder frame.
    filter_width: of the attention's median filter, in frames.
    """

    def __init__(self, tokenizer: Any, rules: WhisperRules, step: float, filter_width: int):
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.all_special_ids)
        self._begin = rules.first_time
        self._step = step
        self._filter_width = filter_width

    def of(self, result: WindowResult, seconds: float, words: bool) -> list[TimedSegment]:
        """Return the segments with text, in order; seconds from the start of the window."""
        spaced = result.language not in UNSPACED
        segments: list[TimedSegment] = []
        for decoded in result.passes:
            if not decoded.skipped:
                segments += self._of_pass(decoded, seconds, words, spaced)
        return [segment for segment in segments if segment.text.strip()]

    def cut(self, tokens: Sequence[int]) -> int | None:
        """Return where the completed part ends: between the last two consecutive timestamps.

        None if there is no such pair, or if a single timestamp at the end marks that no speech
            follows it: then everything is complete.
        """
        times = [token >= self._begin for token in tokens]
        if times[-2:] == [False, True]:
            return None
        pairs = [index for index in range(1, len(times)) if times[index - 1] and times[index]]
        return pairs[-1] if pairs else None

    def _of_pass(
        self, decoded: Pass, seconds: float, words: bool, spaced: bool
    ) -> Iterator[TimedSegment]:
        offset = decoded.seek * self._step / 2
        ends = self._token_ends(decoded) if words else None
        compression = text_compression(self.text(decoded.tokens))
        for first, last, start, end in self._spans(decoded):
            tokens = decoded.tokens[first:last]
            start, end = min(offset + start, seconds), min(offset + end, seconds)
            text = self.text(tokens)
            if ends is not None:
                timed = [
                    word.moved(offset) for word in self._words(decoded, first, last, ends, spaced)
                ]
            else:
                timed = spread(text, start, end, spaced) if words else []
            yield TimedSegment(
                text,
                start,
                end,
                tokens,
                timed,
                decoded.avg_logprob,
                decoded.no_speech_prob,
                decoded.temperature,
                compression,
                decoded.logprobs[first:last],
            )

    def _spans(self, decoded: Pass) -> Iterator[tuple[int, int, float, float]]:
        """Yield (first token, end token, start, end) per segment, in seconds from the pass start."""
        tokens = decoded.tokens
        times = [token >= self._begin for token in tokens]
        bounds = [index for index in range(1, len(times)) if times[index - 1] and times[index]]
        if not bounds:
            timestamps = [token for token in tokens if token >= self._begin]
            last_time = (
                timestamps[-1] - self._begin
                if timestamps and timestamps[-1] != self._begin
                else decoded.frames // 2
            )
            yield 0, len(tokens), 0.0, last_time * self._step
            return
        if times[-2:] == [False, True]:
            bounds.append(len(tokens))
        first = 0
        for last in bounds:
            start, end = self._time(tokens[first]), self._time(tokens[last - 1])
            yield first, last, start, end
            first = last

    def _time(self, token: int) -> float:
        return max(token - self._begin, 0) * self._step

    def _token_ends(self, decoded: Pass) -> list[float] | None:
        if decoded.attention_NTF is None:
            return None
        frames = max(decoded.frames // 2, 1)
        return token_ends(decoded.attention_NTF[..., :frames], self._step, self._filter_width)

    def _words(
        self, decoded: Pass, first: int, last: int, ends: list[float], spaced: bool
    ) -> list[Word]:
        """Return the words of a token range, timed by the attention of their tokens."""
        texts = [index for index in range(first, last) if self._is_text(decoded.tokens[index])]
        found = group_tokens([decoded.tokens[index] for index in texts], self._decode, spaced)
        words = []
        for text, indices in found:
            begin, end = texts[indices[0]], texts[indices[-1]]
            start = ends[min(begin, len(ends)) - 1] if begin else 0.0
            words.append(Word(text, start, max(start, ends[min(end, len(ends) - 1)])))
        return words

    def _is_text(self, token: int) -> bool:
        return token < self._begin and token not in self._special

    def text(self, tokens: list[int]) -> str:
        """Return the text of tokens, without timestamps and other special ones."""
        return self._decode([token for token in tokens if self._is_text(token)])

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
        return text
