"""Draw espeak-ng voices for training and for evaluation: accent, variant, speed, pitch."""

from __future__ import annotations

from random import Random

from recipes.speech.espeak import Voice

# "en" is British.
ACCENTS = (
    "en-us",
    "en-us",
    "en-us",
    "en",
    "en",
    "en-gb-x-rp",
    "en-gb-scotland",
    "en-029",
    "en-gb-x-gbclan",
)
VARIANTS = (
    *(
        "",
        "",
        "m1",
        "m2",
        "m3",
        "m4",
        "m6",
        "m7",
        "f1",
        "f2",
        "f4",
        "f5",
        "klatt",
        "klatt2",
        "klatt4",
    ),
    *(
        "Andy",
        "Annie",
        "Alex",
        "Denis",
        "Jacky",
        "Lee",
        "Michael",
        "Mike",
        "Reed",
        "adam",
        "aunty",
        "belinda",
    ),
    *(
        "benjamin",
        "boris",
        "caleb",
        "david",
        "ed",
        "edward",
        "john",
        "max",
        "paul",
        "quincy",
        "rob",
        "robert",
    ),
    *("victor", "zac", "steph", "grandma", "grandpa", "Marco"),
)
HELD_OUT_VARIANTS = (
    "m5",
    "m8",
    "f3",
    "klatt3",
    "Gene",
    "Mario",
    "linda",
    "travis",
    "marcelo",
    "Storm",
)


def draw_voice(rng: Random, *, held_out: bool = False) -> Voice:
    """Return a random voice; held-out ones have separate variants and pitches.

    Training pitches are even and held-out ones odd, so that no setting is shared even where
    variants resemble each other.
    """
    variant = rng.choice(HELD_OUT_VARIANTS if held_out else VARIANTS)
    accent = rng.choice(ACCENTS)
    return Voice(
        name=f"{accent}+{variant}" if variant else accent,
        rate=min(270, max(110, round(rng.gauss(180, 32)))),
        pitch=2 * min(45, max(5, round(rng.gauss(25, 9)))) + held_out,
        range=min(95, max(10, round(rng.gauss(50, 18)))),
    )
