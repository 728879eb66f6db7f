"""Normalize written English to its spoken form, word by word.

Covers numbers, money, times, units, abbreviations and addresses; symbols are dropped. Each written
word becomes one spoken form, so that the timing of the spoken words is also that of the written
ones.
"""

from __future__ import annotations

import re
from decimal import Decimal

from num2words import num2words

from motet_shared.text.sentences import EMOJI

_ABBREVIATIONS = {
    "mr.": "mister", "mrs.": "missus", "ms.": "miz", "dr.": "doctor", "prof.": "professor", "st.": "saint",
    "sr.": "senior", "jr.": "junior", "gen.": "general", "capt.": "captain", "lt.": "lieutenant", "vs.": "versus",
    "vs": "versus", "etc.": "et cetera", "e.g.": "for example", "i.e.": "that is", "approx.": "approximately",
    "no.": "number", "nos.": "numbers", "vol.": "volume", "fig.": "figure", "inc.": "incorporated", "ltd.": "limited",
    "corp.": "corporation", "co.": "company", "dept.": "department", "est.": "established", "jan.": "january",
    "feb.": "february", "mar.": "march", "apr.": "april", "aug.": "august", "sept.": "september", "oct.": "october",
    "nov.": "november", "dec.": "december", "a.m.": "a m", "p.m.": "p m", "w/": "with", "w/o": "without",
    "&": "and", "+": "plus", "=": "equals", "%": "percent", "@": "at", "<": "less than", ">": "greater than",
    "→": "to", "×": "times", "÷": "divided by", "±": "plus or minus",
}  # fmt: skip
_UNITS = {
    "km": "kilometer", "cm": "centimeter", "mm": "millimeter", "kg": "kilogram", "mg": "milligram", "ml": "milliliter",
    "km/h": "kilometers per hour", "mph": "miles per hour", "ms": "millisecond", "hz": "hertz", "khz": "kilohertz",
    "mhz": "megahertz", "ghz": "gigahertz", "kb": "kilobyte", "mb": "megabyte", "gb": "gigabyte", "tb": "terabyte",
    "m": "meter", "g": "gram", "l": "liter", "s": "second", "h": "hour", "min": "minute", "ft": "feet", "lb": "pound",
    "°c": "degrees celsius", "°f": "degrees fahrenheit", "°": "degrees", "k": "thousand", "bn": "billion", "x": "times",
}  # fmt: skip
_SAME_IN_PLURAL = (
    "hertz",
    "hour",
    "feet",
    "degrees",
    "celsius",
    "fahrenheit",
    "thousand",
    "billion",
    "times",
)
_CURRENCIES = {
    "$": ("dollar", "cent"), "€": ("euro", "cent"), "£": ("pound", "penny"), "¥": ("yen", "sen"),
    "₹": ("rupee", "paisa"),
}  # fmt: skip
_SCALES = {"k": "thousand", "m": "million", "bn": "billion", "b": "billion", "t": "trillion"}

_MARKS = re.compile(rf"[{EMOJI}*_`~#|<>\\^{{}}\[\]]")
_LINK = re.compile(r"\[([^\]]*)\]\([^)\s]*\)")
_SPLIT = re.compile(r"^(?P<open>[\"'(“‘«¿¡]*)(?P<core>.*?)(?P<close>[\"')”’».,;:!?…]*)$", re.DOTALL)
_NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+"
_MONEY = re.compile(
    rf"(?P<minus>[-−])?(?P<sign>[$€£¥₹])(?P<number>{_NUMBER})(?P<scale>k|m|bn|b|t)?", re.I
)
_TIME = re.compile(r"(?P<hour>[01]?\d|2[0-3]):(?P<minute>[0-5]\d)(?P<half>am|pm)?", re.I)
_ORDINAL = re.compile(r"(?P<number>\d+)(?:st|nd|rd|th)", re.I)
_DECADE = re.compile(r"(?P<number>\d{2,4})['’]?s")
_RANGE = re.compile(rf"(?P<low>{_NUMBER})[-–](?P<high>{_NUMBER})(?P<percent>%)?")
_DATE = re.compile(r"(?P<year>\d{4})-(?P<month>0[1-9]|1[0-2])-(?P<day>0[1-9]|[12]\d|3[01])")
_MEASURE = re.compile(rf"(?P<minus>[-−+])?(?P<number>{_NUMBER})(?P<unit>[%°a-zµ/]*)", re.I)
_ADDRESS = re.compile(r"(?:https?://)?(?:www\.)?[\w.+-]+@[\w-]+(?:\.[\w-]+)+|(?:https?://|www\.)\S+|[\w-]+(?:\.[\w-]+)*\.(?:com|org|net|io|dev|ai|edu|gov|uk|de|ch|fr)(?:/\S*)?", re.I)  # fmt: skip  # noqa: E501
_LETTERS = re.compile(r"[A-Z]{2,5}s?|(?:[A-Za-z]\.)+[A-Za-z]")
_VERSION = re.compile(r"\d+(?:\.\d+){2,}")
_MONTHS = (
    "january february march april may june july august september october november december".split()
)


def spoken_words(text: str) -> list[tuple[str, str]]:
    """Return each written word of `text` with its spoken form, "" if it has no pronunciation."""
    text = _LINK.sub(r"\1", text)
    return [(word, spoken(word)) for word in text.split()]


def spoken(word: str) -> str:
    """Return the spoken form of one written word, with punctuation that shapes a sentence."""
    plain = _MARKS.sub("", word.replace("\u2019", "'")) if not _is_address(word) else word
    if (known := _ABBREVIATIONS.get(plain.lower()) or _ABBREVIATIONS.get(word)) is not None:
        return known
    parts = _SPLIT.match(plain)
    assert parts is not None  # all groups may be empty
    core, close = parts["core"], parts["close"]
    if not any(letter.isalnum() for letter in core):
        return ""
    if (known := _ABBREVIATIONS.get(f"{core.lower()}.")) is not None and close.startswith("."):
        return known + close[1:]
    if "." in core and _LETTERS.fullmatch(core):
        close = close.removeprefix(".")  # the period belongs to the last letter
    return f"{parts['open']}{_expand(core)}{close}"


def _expand(core: str) -> str:
    for pattern, say in _RULES:
        if (match := pattern.fullmatch(core)) is not None and (expanded := say(match)) is not None:
            return expanded
    if not any(letter.isdigit() for letter in core):
        return _ABBREVIATIONS.get(core, core).replace("&", " and ").replace("/", " ").strip()
    # Has digits but is no number: replace its digit groups one by one.
    expanded = re.sub(r"\d+", lambda match: f" {_digits_or_number(match[0])} ", core)
    return re.sub(r"[-/_]|\s+", " ", expanded).replace("  ", " ").strip()


def _is_address(word: str) -> bool:
    parts = _SPLIT.match(word)
    return parts is not None and _ADDRESS.fullmatch(parts["core"]) is not None


def _number(text: str) -> str:
    """Return the words of a number such as "1,234.50"."""
    plain = text.replace(",", "")
    whole, point, fraction = plain.partition(".")
    if point:
        return (
            f"{_words(int(whole or 0))} point {' '.join(_words(int(digit)) for digit in fraction)}"
        )
    if (len(whole) > 1 and whole.startswith("0")) or len(whole) > 15:
        return " ".join(_words(int(digit)) for digit in whole)
    return _words(int(whole))


def _digits_or_number(digits: str) -> str:
    return _number(digits) if len(digits) <= 4 else " ".join(_words(int(digit)) for digit in digits)


def _words(number: int, to: str = "cardinal") -> str:
    """Return the words of an integer without commas, such as "twenty-one thousand and five"."""
    return str(num2words(number, to=to)).replace(",", "")


def _expand_money(match: re.Match[str]) -> str:
    unit, part = _CURRENCIES[match["sign"]]
    amount = Decimal(match["number"].replace(",", ""))
    minus = "minus " if match["minus"] else ""
    if scale := _SCALES.get((match["scale"] or "").lower()):
        return f"{minus}{_number(match['number'])} {scale} {_plural(unit, 2)}"
    whole, cents = int(amount), int(amount * 100) % 100
    expanded = f"{_words(whole)} {_plural(unit, whole)}" if whole or not cents else ""
    if cents:
        expanded += f"{' and ' if expanded else ''}{_words(cents)} {_plural(part, cents)}"
    return minus + expanded


def _plural(unit: str, count: int) -> str:
    if count == 1 or unit in ("yen", "sen", "paisa"):
        return unit
    return "pence" if unit == "penny" else f"{unit}s"


def _expand_time(match: re.Match[str]) -> str:
    hour, minute = int(match["hour"]), int(match["minute"])
    half = f" {' '.join(match['half'].lower())}" if match["half"] else ""
    if not minute:
        return (
            f"{_words(hour)}{half}"
            if half
            else f"{_words(hour)} o'clock"
            if 0 < hour <= 12
            else f"{_words(hour)} hundred"
        )
    return f"{_words(hour)} {'oh ' if minute < 10 else ''}{_words(minute)}{half}"


def _expand_decade(match: re.Match[str]) -> str | None:
    number = match["number"]
    if not number.endswith("0"):
        return None
    expanded = _words(int(number), "year")
    return f"{expanded[:-1]}ies" if expanded.endswith("y") else f"{expanded}s"


def _expand_date(match: re.Match[str]) -> str:
    month = _MONTHS[int(match["month"]) - 1]
    return f"{month} {_words(int(match['day']), 'ordinal')} {_words(int(match['year']), 'year')}"


def _expand_measure(match: re.Match[str]) -> str | None:
    unit, number = match["unit"].lower(), match["number"]
    minus = {"-": "minus ", "−": "minus ", "+": "plus "}.get(match["minus"] or "", "")
    if not unit:
        year = re.fullmatch(r"1[1-9]\d\d|20[1-9]\d", number) and not minus
        return _words(int(number), "year") if year else minus + _number(number)
    if unit == "%":
        return f"{minus}{_number(number)} percent"
    if (name := _UNITS.get(unit)) is None:
        return None
    alone = number == "1" or name.split()[-1] in _SAME_IN_PLURAL or "per" in name
    return f"{minus}{_number(number)} {name if alone else name + 's'}"


def _expand_range(match: re.Match[str]) -> str:
    return f"{_number(match['low'])} to {_number(match['high'])}{' percent' if match['percent'] else ''}"


def _expand_address(match: re.Match[str]) -> str:
    text = re.sub(r"^https?://(?:www\.)?|^www\.", "", match[0], flags=re.I).rstrip("/")
    text = re.sub(r"[?#].*$", "", text)  # query and fragment are not read out
    for sign, name in (
        (".", " dot "),
        ("/", " slash "),
        ("@", " at "),
        ("-", " dash "),
        ("_", " underscore "),
    ):
        text = text.replace(sign, name)
    text = re.sub(r"\d+", lambda digits: f" {_digits_or_number(digits[0])} ", text)
    return " ".join(text.split())


def _expand_letters(match: re.Match[str]) -> str | None:
    """Spell abbreviations that have no vowel, have dots or are listed; None: read as a word."""
    text = match[0]
    if "." in text:
        return " ".join(text.replace(".", ""))
    letters = text.removesuffix("s")
    if re.search(r"[AEIOUY]", letters) and letters not in _SPELLED:
        return None
    return " ".join(letters) + ("'s" if letters != text else "")


_SPELLED = frozenset("AI API UI USA UK EU IT ID URL CPU GPU USB TV OK IP OS FAQ CEO AM PM".split())

_RULES = (
    (_ADDRESS, _expand_address),
    (_DATE, _expand_date),
    (_MONEY, _expand_money),
    (_TIME, _expand_time),
    (_ORDINAL, lambda match: _words(int(match["number"]), "ordinal")),
    (_DECADE, _expand_decade),
    (_RANGE, _expand_range),
    (_VERSION, lambda match: " point ".join(_number(part) for part in match[0].split("."))),
    (_MEASURE, _expand_measure),
    (_LETTERS, _expand_letters),
)
