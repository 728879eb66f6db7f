"""Split text into sentences for speech, and a first clause so that the first sound comes early.

    cutter = Cutter()
    for piece in reply:            # as a language model writes it
        for chunk in cutter.push(piece):
            speak(chunk.text)
    for chunk in cutter.flush():
        speak(chunk.text)

A cut is made as soon as it is certain, which requires the character after it: "3." may become
"3.14", and "Dr." does not end a sentence. Cuts depend on the text alone, never on the pieces in
which it arrived. The rules are those of European languages and of Chinese and Japanese full stops;
the abbreviations are English.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

# minimum characters of a first clause that is spoken before its sentence is complete
FIRST_CLAUSE = 16
LONGEST = 280  # characters after which a sentence is cut at a comma, or else at a space

EMOJI = (
    "\u2600-\u27bf\u2b05-\u2b55\ufe0f\u200d\u20e3\u2190-\u21ff\u2300-\u23ff"
    "\U0001f000-\U0001faff\U000e0020-\U000e007f"
)
_CLOSERS = "\"')\\]}”’»*_`"
# Possessive: a run of stops that no space follows is tried once, not in all of its parts.
_ENDS = re.compile(
    rf"(?P<stop>[.!?…]++|[{EMOJI}]++)[{_CLOSERS}{EMOJI}.!?…]*+(?=\s|$)"
    rf"|(?P<full>[。！？]++)[{_CLOSERS}」』]*+"
    r"|(?P<comma>[,;:—–])(?=\s|$)"
    r"|(?P<line>\n)"
)
_WORD = re.compile(r"(?:^|[\s(\[{\"'“‘*_])([^\s(\[{\"'“‘*_]+)$")
_LIST_ITEM = re.compile(r"(?:[-*•+]|\d{1,3}[.)])\s")

# Abbreviations whose full stop does not end a sentence. The first set is always followed by more
# text, the second only before numbers.
_TITLES = frozenset(
    "mr mrs ms dr prof st sr jr gen sen rep gov capt lt col sgt rev hon messrs mme mlle vs e.g i.e cf viz al fig figs"
    " eq vol pp ed eds ca approx nr dept est min max".split()
)
_BEFORE_NUMBERS = frozenset(
    "no nos p art sec ch jan feb mar apr jun jul aug sep sept oct nov dec".split()
)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Chunk of text to speak.

    `text` is stripped; `start` and `end` are its span in the whole text, including the space before
    it.
    """

    text: str
    start: int
    end: int


class Cutter:
    """Split text that arrives in pieces into chunks, as soon as each cut is certain.

    begun: earlier sentences were already spoken, so no first clause is split off.
    """

    def __init__(
        self, *, begun: bool = False, first_clause: int = FIRST_CLAUSE, longest: int = LONGEST
    ):
        self._first_clause = first_clause
        self._longest = longest
        self._rest = ""
        self._at = 0  # offset of `_rest` in the whole text
        self._any = begun

    def push(self, piece: str) -> list[Chunk]:
        """Add text and return the chunks that are certain."""
        self._rest += piece
        return list(self._cut(final=False))

    def flush(self) -> list[Chunk]:
        """Return the remaining chunks, at the end of the text."""
        return list(self._cut(final=True))

    def _cut(self, final: bool) -> Iterator[Chunk]:
        while self._rest:
            end = self._next_end(final)
            if end is None:
                return
            text, start = self._rest[:end].strip(), self._at
            self._rest, self._at = self._rest[end:], start + end
            if text:
                self._any = True
                yield Chunk(text, start, self._at)

    def _next_end(self, final: bool) -> int | None:
        """Return the end of the next chunk in the rest; None while it is not certain."""
        rest = self._rest
        spoken = len(rest) - len(rest.lstrip())
        comma = 0
        for match in _ENDS.finditer(rest, spoken, spoken + self._longest + 1):
            if match.end() > spoken + self._longest:
                break
            if match["comma"]:
                certain: bool | None = not self._any and match.end() - spoken >= self._first_clause
                if match.end() == len(rest) and not final:
                    certain = None  # a digit may follow, as in 1,000
                comma = match.end()
            else:
                certain = _is_end(rest, spoken, match, final)
            if certain is None:
                return None
            if certain:
                return match.end()
        if len(rest) > spoken + self._longest:
            return comma or _last_space(rest, spoken, spoken + self._longest)
        return len(rest) if final else None


def cut(text: str, *, begun: bool = False) -> list[Chunk]:
    """Return all chunks of a complete text."""
    cutter = Cutter(begun=begun)
    return cutter.push(text) + cutter.flush()


def _is_end(text: str, begin: int, match: re.Match[str], final: bool) -> bool | None:
    """Return whether a sentence ends at `match`; None if that depends on text to come."""
    if match["full"]:
        return True if final or match.end() < len(text) else None
    following = text[match.end() :].lstrip()
    if not following:
        return True if final else None
    if match["line"]:
        return _is_line_end(text, match.end(), following, final)
    if following[0].islower():
        return False
    return not (
        match["stop"] == "." and _is_abbreviation(text[begin : match.start()], following[0])
    )


def _is_line_end(text: str, end: int, following: str, final: bool) -> bool | None:
    """Return whether a line break ends a sentence; None if that depends on text to come.

    An empty line and the beginning of a list item end a sentence; a wrapped line does not.
    """
    gap = text[end : len(text) - len(following)]
    if "\n" in gap:
        return True
    if len(following) < 5 and not final and re.fullmatch(r"[-*•+]|\d{1,3}[.)]?", following):
        return None
    return _LIST_ITEM.match(following) is not None


def _is_abbreviation(before: str, following: str) -> bool:
    """Return True if the full stop after `before` belongs to its last word, not to the sentence."""
    found = _WORD.search(before)
    if found is None:
        return False
    word = found[1].lower()
    if word in _TITLES or (word in _BEFORE_NUMBERS and following.isdigit()):
        return True
    if len(word) == 1 and word.isalpha():  # an initial, unless it is the pronoun
        return found[1].isupper() and word != "i"
    return word.isdigit() and found.start(1) == 0  # the number of a list item


def _last_space(text: str, begin: int, end: int) -> int:
    """Return the position of the last space or line break in `begin` to `end`, else `end`."""
    space = max(text.rfind(" ", begin, end + 1), text.rfind("\n", begin, end + 1))
    return space if space > begin else end
