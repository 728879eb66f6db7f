"""Write turns that need no scene: small talk, sums, counting and polite refusals."""

from __future__ import annotations

from random import Random

from recipes.chat.topics import HELD_OUT_THINGS, NAMES, OUT_OF_WORLD, PLACES, THINGS
from recipes.training.errors import RecipeError
from recipes.world.scenes import (
    COLOURS,
    NUMBERS,
    SHAPES,
    Question,
    listing,
    questions,
    sample_scene,
    sentence,
)

REFUSAL = "Sorry, I don't know that. I only know coloured shapes and small numbers."
TOO_LARGE = "Sorry, I can only add and subtract up to twenty."
NO_SCENE = "Please describe a scene first."
IDENTITY = "I am Pocket, a small assistant for coloured shapes."
ABILITY = (
    "I can see and count coloured shapes, do small sums, draw with a tool and call other tools."
)

_SMALL_TALK: dict[str, tuple[str, ...]] = {
    "Hello! How can I help?": (
        *(
            "Hello{n}!",
            "Hello{n}.",
            "Hi{n}!",
            "Hi{n}.",
            "Hey{n}!",
            "Good morning{n}!",
            "Good evening{n}.",
            "Hi there{n}!",
        ),
        *(
            "Hello there{n}!",
            "Good afternoon{n}.",
            "Hello, I am {w}.",
            "Hi, my name is {w}.",
            "Hey, this is {w}.",
        ),
        *(
            "Hello, can you help me?",
            "Hi, are you there?",
            "Hello again{n}!",
            "Greetings{n}!",
            "Say hello{n}.",
        ),
    ),
    "I am fine, thank you.": (
        *(
            "How are you{n}?",
            "How are you doing{n}?",
            "Hello{n}, how are you?",
            "Hi{n}, how are you today?",
        ),
        *("How do you do{n}?", "How is it going{n}?", "Are you well{n}?", "How are you today{n}?"),
    ),
    "You are welcome.": (
        *(
            "Thanks{n}!",
            "Thank you{n}.",
            "Thank you very much{n}!",
            "Great, thanks{n}.",
            "Thanks a lot{n}!",
        ),
        *(
            "Perfect, thank you{n}.",
            "Nice, thanks{n}!",
            "That was helpful{n}, thank you.",
            "Many thanks{n}.",
        ),
        *("Well done{n}, thank you.", "Good job, thanks{n}.", "Ok, thanks{n}."),
    ),
    "Goodbye!": (
        *(
            "Goodbye{n}!",
            "Bye{n}!",
            "See you later{n}.",
            "Good night{n}.",
            "Bye bye{n}!",
            "See you{n}!",
        ),
        *(
            "I have to go now{n}.",
            "Ok, bye{n}.",
            "Thanks, goodbye{n}.",
            "Farewell{n}.",
            "See you tomorrow{n}.",
        ),
    ),
    IDENTITY: (
        *(
            "Who are you{n}?",
            "What are you{n}?",
            "What is your name{n}?",
            "Tell me about yourself{n}.",
        ),
        *(
            "Hi{n}, who are you?",
            "Hello{n}, what is your name?",
            "Introduce yourself{n}.",
            "Are you a robot{n}?",
        ),
    ),
    ABILITY: (
        *(
            "What can you do{n}?",
            "How can you help me{n}?",
            "What do you know{n}?",
            "Help{n}!",
            "What are you able to do?",
        ),
        *(
            "Hi{n}, what can you do?",
            "Hello{n}, what do you know?",
            "What are you good at{n}?",
            "Can you help me{n}?",
        ),
    ),
    sentence(listing(SHAPES)): (
        "Which shapes do you know{n}?",
        "What shapes do you know{n}?",
        "Name all shapes{n}.",
    ),
    sentence(listing(COLOURS)): (
        "Which colours do you know{n}?",
        "What colors do you know{n}?",
        "Name all colours{n}.",
    ),
}


def small_talk(rng: Random, *, named: bool = False) -> Question:
    """Return a greeting, thanks, a goodbye or a question about the model; `named`: with a name."""
    answer = rng.choice(list(_SMALL_TALK))
    text = rng.choice([form for form in _SMALL_TALK[answer] if "{" in form or not named])
    who = rng.choice((*NAMES, "Pocket", "friend", "my friend", "everyone"))
    return Question(
        "small-talk",
        text.format(n=f", {who}" if named or rng.random() < 0.4 else "", w=rng.choice(NAMES)),
        answer,
    )


_ABILITY_FORMS = (
    "What can I ask you{n}?",
    "What do you offer{n}?",
    "Tell me what you can do{n}.",
    "List your abilities.",
    "What are your skills{n}?",
    "What can you help me with?",
    "What is it that you do{n}?",
)


def abilities(rng: Random) -> Question:
    """Return a question about what the model can do; its answer names all of it."""
    text = rng.choice((*_SMALL_TALK[ABILITY], *_ABILITY_FORMS))
    name = f", {rng.choice((*NAMES, 'Pocket'))}" if rng.random() < 0.2 else ""
    return Question("small-talk", text.format(n=name), ABILITY)


def _number(value: int, *, digits: bool) -> str:
    return str(value) if digits or value > 20 else NUMBERS[value]


_PLUS = (
    *(
        "What is {0} plus {1}?",
        "What is {0} plus {1}?",
        "{0} plus {1}",
        "How much is {0} plus {1}?",
        "Add {0} and {1}.",
    ),
    *(
        "What is the sum of {0} and {1}?",
        "Calculate {0} plus {1}.",
        "What does {0} plus {1} make?",
        "And {0} plus {1}?",
    ),
)
_MINUS = (
    *(
        "What is {0} minus {1}?",
        "What is {0} minus {1}?",
        "{0} minus {1}",
        "How much is {0} minus {1}?",
    ),
    *(
        "Calculate {0} minus {1}.",
        "Subtract {1} from {0}.",
        "What is {0} take away {1}?",
        "And {0} minus {1}?",
    ),
)
_SIGNS = (
    "What is {0} {s} {1}?",
    "{0} {s} {1}",
    "{0} {s} {1} =",
    "{0}{s}{1}",
    "What is {0}{s}{1}?",
    "Calculate {0} {s} {1}.",
)


def arithmetic(rng: Random) -> Question:
    """Return a sum or difference of 0 to 20, in words or digits, answered in the same form."""
    plus = rng.random() < 0.5
    if plus:
        total = rng.randint(0, 20)
        first = rng.randint(0, total)
        second, result = total - first, total
    else:
        first = rng.randint(0, 20)
        second = rng.randint(0, first)
        result = first - second
    digits = rng.random() < 0.5
    a, b = (_number(value, digits=digits) for value in (first, second))
    if digits and rng.random() < 0.6:
        text = rng.choice(_SIGNS).format(a, b, s="+" if plus else "-")
    else:
        text = rng.choice(_PLUS if plus else _MINUS).format(a, b)
    return Question("arithmetic", text, sentence(_number(result, digits=digits)))


def too_large(rng: Random) -> Question:
    """Return arithmetic that the model declines: products, quotients, numbers above twenty."""
    if rng.random() < 0.5:
        sign = rng.choice(
            ("times", "divided by", "multiplied by", "to the power of", "*", "x", "/")
        )
        a, b = rng.randint(0, 120), rng.randint(0, 30)
    else:
        sign, a, b = (
            rng.choice(("plus", "minus", "+", "-")),
            rng.randint(21, 999),
            rng.randint(0, 999),
        )
    text = rng.choice(
        (
            "What is {0} {s} {1}?",
            "{0} {s} {1}",
            "How much is {0} {s} {1}?",
            "Calculate {0} {s} {1}.",
        )
    )
    digits = sign in "+-*x/" or rng.random() < 0.7
    return Question(
        "arithmetic",
        text.format(_number(a, digits=digits), _number(b, digits=digits), s=sign),
        TOO_LARGE,
    )


def counting(rng: Random) -> Question:
    """Return a counting task, such as "Count to five"."""
    start, stop = sorted(rng.sample(range(21), 2))
    draw = rng.random()
    if draw < 0.6 and stop > 1:
        start, form = (
            1,
            rng.choice(
                (
                    "Count to {1}.",
                    "Count up to {1}.",
                    "Please count to {1}.",
                    "Can you count to {1}?",
                )
            ),
        )
    elif draw < 0.8:
        form = "Count from {0} to {1}."
    else:
        start, stop, form = (
            stop,
            start,
            rng.choice(("Count down from {0} to {1}.", "Count backwards from {0} to {1}.")),
        )
    numbers = range(start, stop + 1) if start < stop else range(start, stop - 1, -1)
    digits = rng.random() < 0.3
    text = form.format(_number(start, digits=digits), _number(stop, digits=digits))
    return Question("counting", text, sentence(", ".join(NUMBERS[number] for number in numbers)))


_SYLLABLES = (
    "ba",
    "lo",
    "ri",
    "ten",
    "mas",
    "qua",
    "ver",
    "no",
    "pil",
    "sha",
    "gu",
    "ex",
    "or",
    "dim",
    "sky",
    "fe",
    "zan",
)


def _random_word(rng: Random) -> str:
    return "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(2, 4)))


def refusal(rng: Random, *, held_out: bool = False) -> Question:
    """Return a general question that the model declines; held-out ones use separate topics."""
    things = HELD_OUT_THINGS if held_out else THINGS
    thing = rng.choice(things) if rng.random() < 0.75 else _random_word(rng)
    place = rng.choice(PLACES) if rng.random() < 0.75 else _random_word(rng).capitalize()
    other = rng.choice(things) if rng.random() < 0.75 else _random_word(rng)
    text = rng.choice(OUT_OF_WORLD).format(
        t=thing, p=place, o=other, w=rng.choice(NAMES), n=rng.randint(2, 2030)
    )
    return Question("refusal", text, REFUSAL)


def no_scene(rng: Random) -> Question:
    """Return a question about a scene where none was described."""
    found = rng.choice(questions(sample_scene(rng), rng))
    return Question("no-scene", found.text, NO_SCENE)


def question(category: str, rng: Random, *, held_out: bool = False) -> Question:
    """Return a question of a category that needs no scene. Raises RecipeError if unknown."""
    if category == "small-talk":
        return small_talk(rng, named=held_out)
    if category == "refusal":
        return refusal(rng, held_out=held_out)
    makers = {"arithmetic": arithmetic, "too-large": too_large, "counting": counting}
    if category not in makers:
        raise RecipeError(
            f"category={category!r} is unknown: use small-talk, refusal, {', '.join(makers)}",
            param="category",
        )
    return makers[category](rng)
