"""Generate general English sentences by a small grammar over the word lists.

Words are chosen independently of their meaning, so that a model cannot guess one from its context.
"""

from __future__ import annotations

from random import Random

from recipes.speech.lexicon import Verb, article, number, plural, verbs, words
from recipes.world.scenes import sentence

NOUNS = ("person", "animal", "thing", "place", "abstract", "food", "body")
THINGS = ("thing", "thing", "animal", "food", "abstract", "place", "person", "body")
DETERMINERS = (
    "the the the the my your his her our their this that every another each some no".split()
)
MANY = "the the these those some many several few all both most our their my your his her two three four".split()
SUBJECTS = (
    ("I", 1),
    ("you", 2),
    ("he", 3),
    ("she", 3),
    ("it", 3),
    ("we", 2),
    ("they", 2),
    ("everybody", 3),
)
OBJECTS = "me you him her it us them everything nothing something somebody nobody".split()
MODALS = (
    "can could will would should must may might cannot couldn't won't wouldn't shouldn't".split()
)
PLACED = "in near behind under beside on at above inside outside across from around past opposite".split()
JOINTS = "and but because although while when before after until unless if so or since".split()
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth last next".split()
UNITS = "euros dollars pounds metres kilometres miles percent litres kilograms pages points degrees people".split()
INTERJECTIONS = "well oh yes no okay sorry please thanks look listen wow sure excuse me good morning of course".split()
ASIDES = (
    *(
        "I am not sure.",
        "That is right.",
        "Thank you very much.",
        "See you soon.",
        "What a surprise!",
        "Not at all.",
    ),
    *(
        "I do not think so.",
        "Good luck!",
        "Have a nice day.",
        "Let me think about it.",
        "It does not matter.",
    ),
    *(
        "That sounds good.",
        "You are welcome.",
        "I have no idea.",
        "Never mind.",
        "Wait a minute, please.",
        "Excuse me.",
    ),
)


class SentenceGrammar:
    """Generate sentences from one source of randomness."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng

    def word(self, *sections: str) -> str:
        """Return a word of one of the sections, each equally likely."""
        return self.rng.choice(words(self.rng.choice(sections)))

    def maybe(self, text: str, share: float = 0.3) -> str:
        """Return the text in `share` of the cases, else nothing."""
        return text if self.rng.random() < share else ""

    def noun(self, *sections: str) -> str:
        """Return a noun, sometimes with an adjective or another noun before it."""
        draw = self.rng.random()
        noun = self.word(*(sections or THINGS))
        if draw < 0.42:
            return f"{self.word('adjective')} {noun}"
        return f"{self.word('thing', 'food', 'abstract')} {noun}" if draw < 0.47 else noun

    def nouns(self) -> str:
        """Return a noun in the plural."""
        *before, last = self.noun().split()
        return " ".join([*before, plural(last)])

    def phrase(self, *sections: str) -> tuple[str, int]:
        """Return a noun phrase and its verb form: 1 as for I, 2 for you and plurals, 3 for he."""
        draw = self.rng.random()
        if draw < 0.14 and not sections:
            return self.word("name"), 3
        if draw < 0.24:
            return f"{self.rng.choice(MANY)} {self.nouns()}", 2
        if draw < 0.29:
            return f"{number(self.rng.randint(2, 99))} {self.nouns()}", 2
        if draw < 0.36:
            return (
                f"{self.maybe('the ')}{self.maybe(self.word('adjective') + ' ')}{self.word('mass')}",
                3,
            )
        if draw < 0.41:
            return f"{self.word('name')}'s {self.noun(*sections)}", 3
        if draw < 0.46:
            return f"the {self.noun(*sections)} of {self.rng.choice(DETERMINERS)} {self.noun()}", 3
        if draw < 0.5:
            return f"the {self.rng.choice(ORDINALS)} {self.noun(*sections)}", 3
        noun = self.noun(*sections)
        return (article(noun) if draw < 0.7 else f"{self.rng.choice(DETERMINERS)} {noun}"), 3

    def subject(self) -> tuple[str, int]:
        """Return a subject and its verb form."""
        return self.rng.choice(SUBJECTS) if self.rng.random() < 0.4 else self.phrase()

    def object(self) -> str:
        """Return an object."""
        return self.rng.choice(OBJECTS) if self.rng.random() < 0.12 else self.phrase()[0]

    def place(self) -> str:
        """Return a phrase of place."""
        draw = self.rng.random()
        if draw < 0.25:
            return f"in {self.word('city', 'land')}"
        if draw < 0.4:
            return f"{self.word('relation')} {self.phrase()[0]}"
        return f"{self.rng.choice(PLACED)} {self.rng.choice(('the', 'the', 'a', 'my', 'our'))} {self.word('place')}"

    def time(self) -> str:
        """Return a phrase of time."""
        draw, rng = self.rng.random(), self.rng
        if draw < 0.25:
            return self.word("when")
        if draw < 0.4:
            return f"on {self.word('weekday')}{self.maybe(' ' + rng.choice(('morning', 'evening', 'night')))}"
        if draw < 0.5:
            return f"in {self.word('month')}"
        if draw < 0.6:
            return f"at {rng.choice(('', '', 'half past ', 'quarter to ', 'ten past '))}{number(rng.randint(1, 12))}"
        if draw < 0.75:
            return f"{number(rng.randint(2, 60))} {plural(self.word('period'))} {rng.choice(('ago', 'later', 'long'))}"
        return f"{rng.choice(('every', 'last', 'next', 'this', 'one'))} {self.word('period')}"

    def verb(self) -> tuple[Verb, bool]:
        """Return a verb, and whether it takes an object."""
        kind = self.rng.choice(("transitive", "transitive", "intransitive", "irregular"))
        return self.rng.choice(verbs(kind)), kind != "intransitive"

    def action(self, person: int) -> str:
        """Return a verb phrase in a random tense that agrees with its subject."""
        verb, takes = self.verb()
        draw, third = self.rng.random(), person == 3
        be = {1: "am", 2: "are", 3: "is"}[person]
        if draw < 0.36:
            phrase = verb.past
        elif draw < 0.54:
            phrase = verb.third if third else verb.base
        elif draw < 0.66:
            phrase = f"{self.rng.choice(MODALS)} {verb.base}"
        elif draw < 0.75:
            phrase = f"{be if draw < 0.72 else 'was' if person != 2 else 'were'} {verb.gerund}"
        elif draw < 0.84:
            phrase = f"{'has' if third else 'have'} {self.maybe('never ')}{verb.participle}"
        elif draw < 0.93:
            phrase = f"{self.rng.choice(('does not', 'did not') if third else ('do not', 'did not'))} {verb.base}"
        else:
            phrase = (
                f"{self.rng.choice(('wanted', 'decided', 'tried', 'hoped', 'used'))} to {verb.base}"
            )
        return f"{phrase} {self.object()}" if takes else phrase

    def state(self, person: int) -> str:
        """Return a form of "to be" with its complement."""
        be = self.rng.choice(
            ({1: "am", 2: "are", 3: "is"}[person], "were" if person == 2 else "was")
        )
        degree = self.maybe(
            self.rng.choice(("very ", "not ", "too ", "quite ", "so ", "rather ", "never ")), 0.4
        )
        draw = self.rng.random()
        if draw < 0.55:
            return f"{be} {degree}{self.word('adjective')}"
        return (
            f"{be} {self.place() if draw < 0.75 else self.phrase('person', 'thing', 'abstract')[0]}"
        )

    def clause(self) -> str:
        """Return a subject, a verb phrase and perhaps manner, place or time."""
        who, person = self.subject()
        phrase = self.state(person) if self.rng.random() < 0.25 else self.action(person)
        draw = self.rng.random()
        extra = ""
        if draw < 0.16:
            extra = " " + self.word("manner")
        elif draw < 0.32:
            extra = " " + self.place()
        elif draw < 0.5:
            extra = " " + self.time()
        return f"{who} {phrase}{extra}"

    def question(self) -> str:
        """Return a question."""
        who, person = self.subject()
        verb, takes = self.verb()
        what = f" {self.object()}" if takes else ""
        do = self.rng.choice(("did", "does" if person == 3 else "do"))
        ask = self.rng.choice(("why", "when", "where", "how", "how often"))
        be = {1: "am", 2: "are", 3: "is"}[person]
        noun = self.noun()
        forms = (
            f"{do} {who} {verb.base}{what}",
            f"{ask} {do} {who} {verb.base}{what}",
            f"{self.rng.choice(MODALS[:8])} {who} {verb.base}{what} {self.maybe(self.time(), 0.4)}".rstrip(),
            f"{be} {who} {self.word('adjective')}",
            f"what is {article(noun)}",
            f"{self.rng.choice(('who', 'what'))} {verb.past}{what}",
            f"how {self.word('adjective')} {be} {who}",
            f"how many {self.nouns()} are {self.place()}",
            f"which {noun} {do} {who} {self.rng.choice(verbs('transitive')).base}",
        )
        return self.rng.choice(forms) + "?"

    def order(self) -> str:
        """Return an imperative sentence."""
        verb, takes = self.verb()
        what = f" {self.object()}" if takes else f" {self.word('manner')}"
        tail = self.maybe(" " + self.rng.choice((self.time(), self.place())), 0.3)
        lead = self.rng.choice(("", "", "please ", "do not ", "never ", "let us ", "don't "))
        return f"{lead}{verb.base}{what}{tail}."

    def numbers(self) -> str:
        """Return a sentence with a price, year, date or distance in words."""
        rng, value = (
            self.rng,
            number(self.rng.choice((self.rng.randint(2, 100), self.rng.randint(2, 3000)))),
        )
        year = f"{number(rng.randint(11, 20))} {number(rng.randint(10, 99))}"
        forms = (
            f"{self.phrase('thing', 'food')[0]} costs {value} {rng.choice(UNITS[:3])}.",
            f"it happened in {year}.",
            f"{self.word('name')} was born on the {rng.choice(ORDINALS[:12])} of {self.word('month')}, {year}.",
            f"the {self.noun()} is {value} {rng.choice(UNITS)} {self.rng.choice(('long', 'high', 'deep', 'away'))}.",
            f"{self.word('city')} has {value} {self.nouns()}.",
            f"the answer is {value}.",
            f"call {' '.join(number(rng.randint(0, 9)) for _ in range(rng.randint(3, 7)))}.",
            f"it is {rng.choice(('half past', 'quarter to', 'ten to', 'twenty past'))} {number(rng.randint(1, 12))}.",
        )
        return rng.choice(forms)

    def listed(self) -> str:
        """Return a list of words without grammar."""
        count = self.rng.randint(2, 6)
        sections = (
            "adjective",
            "manner",
            "when",
            "transitive",
            "name",
            "mass",
            "period",
            "relation",
            *NOUNS,
        )
        return ", ".join(self.word(*sections) for _ in range(count)) + "."

    def sentence(self) -> str:
        """Return a sentence of two to about twenty words, capitalized and punctuated."""
        draw = self.rng.random()
        if draw < 0.38:
            text = f"{self.maybe(self.word('sentiment') + ', ', 0.12)}{self.clause()}."
        elif draw < 0.5:
            joint = self.rng.choice(JOINTS)
            text = f"{self.clause()}{self.maybe(',')} {joint} {self.clause()}."
        elif draw < 0.68:
            text = self.question()
        elif draw < 0.77:
            text = self.order()
        elif draw < 0.86:
            text = self.numbers()
        elif draw < 0.93:
            text = self.listed()
        elif draw < 0.96:
            text = f"{self.rng.choice(INTERJECTIONS)}, {self.clause()}."
        elif draw < 0.98:
            text = f"what {article(self.noun())}!"
        else:
            text = self.rng.choice(ASIDES)
        return sentence(" ".join(text.split()), "")


def general(rng: Random) -> str:
    """Return a random sentence of general English."""
    return SentenceGrammar(rng).sentence()
