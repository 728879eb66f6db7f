"""Inflect the words of `speech/words.txt`: plurals, verb forms, numbers in words."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from recipes.training.errors import RecipeError
from recipes.world.scenes import NUMBERS

VOWELS = "aeiou"
TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
IRREGULAR_PLURALS = {
    **{
        "man": "men",
        "woman": "women",
        "child": "children",
        "foot": "feet",
        "tooth": "teeth",
        "goose": "geese",
    },
    **{
        "mouse": "mice",
        "ox": "oxen",
        "fish": "fish",
        "deer": "deer",
        "sheep": "sheep",
        "salmon": "salmon",
    },
    **{
        "knife": "knives",
        "wolf": "wolves",
        "leaf": "leaves",
        "shelf": "shelves",
        "thief": "thieves",
    },
    **{
        "calf": "calves",
        "life": "lives",
        "scarf": "scarves",
        "potato": "potatoes",
        "tomato": "tomatoes",
    },
    **{
        "hero": "heroes",
        "mosquito": "mosquitoes",
        "mango": "mangoes",
        "volcano": "volcanoes",
        "echo": "echoes",
    },
    **{
        "crisis": "crises",
        "analysis": "analyses",
        "dragonfly": "dragonflies",
        "buffalo": "buffalo",
    },
    **{"series": "series", "scissors": "scissors", "trousers": "trousers", "stairs": "stairs"},
    **{
        "snowman": "snowmen",
        "gentleman": "gentlemen",
        "fisherman": "fishermen",
        "chairman": "chairmen",
    },
}
DOUBLED = frozenset("prefer regret begin control forget cancel travel label quit equip".split())


class Verb(NamedTuple):
    """Hold the forms of a verb: walk, walks, walking, walked, walked."""

    base: str
    third: str
    gerund: str
    past: str
    participle: str


@cache
def sections() -> dict[str, tuple[str, ...]]:
    """Return the word lists by name; entries of [irregular] are three words each."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in (Path(__file__).parent / "words.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            current = found.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            current.append(line)
    return {
        name: tuple(
            entry.strip() for entry in " ".join(lines).split(";" if name == "irregular" else " ")
        )
        for name, lines in found.items()
    }


@cache
def words(*names: str) -> tuple[str, ...]:
    """Return the entries of one or more sections, without duplicates."""
    return tuple(dict.fromkeys(word for name in names for word in sections()[name]))


@cache
def verbs(kind: str) -> tuple[Verb, ...]:
    """Return the verbs of a section in all forms."""
    if kind == "irregular":
        return tuple(_irregular(*entry.split()) for entry in sections()[kind])
    return tuple(Verb(v, third_person(v), gerund(v), _past(v), _past(v)) for v in sections()[kind])


def _irregular(base: str, past: str, participle: str) -> Verb:
    third = {"have": "has", "do": "does", "go": "goes"}.get(base) or third_person(base)
    return Verb(base, third, gerund(base), past, participle)


def plural(noun: str) -> str:
    """Return the plural of a noun."""
    return IRREGULAR_PLURALS.get(noun) or third_person(noun)


def third_person(word: str) -> str:
    """Add the ending -s of verbs and nouns."""
    if word.endswith(("s", "x", "z", "ch", "sh")):
        return word + "es"
    return _ies(word) + "es" if _ies(word) != word else word + "s"


def gerund(verb: str) -> str:
    """Return the -ing form of a verb."""
    if verb.endswith("ie"):
        return verb[:-2] + "ying"
    if verb.endswith("e") and not verb.endswith(("ee", "oe", "ye")):
        return verb[:-1] + "ing"
    return _doubled(verb) + "ing"


def _past(verb: str) -> str:
    if verb.endswith("e"):
        return verb + "d"
    return _ies(verb) + "ed" if _ies(verb) != verb else _doubled(verb) + "ed"


def _ies(word: str) -> str:
    """Replace a final y after a consonant by i."""
    return word[:-1] + "i" if word.endswith("y") and word[-2] not in VOWELS else word


def _doubled(verb: str) -> str:
    """Double the last consonant after a short stressed vowel: stop, prefer, begin, control."""
    if verb in DOUBLED:
        return verb + verb[-1]
    groups = sum(here in VOWELS and after not in VOWELS for here, after in pairwise(verb))
    ends = (
        len(verb) > 2
        and verb[-1] not in VOWELS + "wxy"
        and verb[-2] in VOWELS
        and verb[-3] not in VOWELS
    )
    return verb + verb[-1] if ends and groups == 1 else verb


def article(phrase: str) -> str:
    """Prefix "an" before a vowel sound, else "a"."""
    silent = phrase.startswith(("hour", "honest", "honour", "heir"))
    hard = phrase.startswith(("uni", "use", "usu", "euro", "one", "once", "ewe", "urin", "ute"))
    return ("an " if silent or (phrase[0] in VOWELS and not hard) else "a ") + phrase


def number(value: int) -> str:
    """Return 0 to 999,999 in words, as "three hundred and forty-two". Raises RecipeError beyond."""
    if not 0 <= value < 1_000_000:
        raise RecipeError(f"value={value} is out of range: use 0 to 999999", param="value")
    if value >= 1000:
        rest = value % 1000
        joint = " and " if 0 < rest < 100 else " "
        return f"{number(value // 1000)} thousand" + (joint + number(rest) if rest else "")
    if value >= 100:
        return f"{NUMBERS[value // 100]} hundred" + (
            f" and {number(value % 100)}" if value % 100 else ""
        )
    if value <= 20:
        return NUMBERS[value]
    return TENS[value // 10 - 2] + (f"-{NUMBERS[value % 10]}" if value % 10 else "")
