"""Draw held-out pictures with Pillow's ImageDraw, and ask about them in words of their own.

Nothing here shares code with the recipes that train: neither their scenes, nor their renderers, nor
their questions. Shapes stand anywhere; one to six of them; pictures of 24 to 1,024 pixels.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from dataclasses import dataclass
from random import Random

from PIL import Image, ImageColor, ImageDraw

PICTURES = 50
# Names of CSS, so that no range of hues of any training is looked at.
COLOURS = {
    "red": ("red", "crimson", "#d62728"),
    "green": ("green", "forestgreen", "#2ca02c", "limegreen"),
    "blue": ("blue", "royalblue", "#1f5fd4", "mediumblue"),
    "yellow": ("yellow", "gold", "#f5d90a"),
    "orange": ("orange", "darkorange", "#ff7f0e"),
    "purple": ("purple", "rebeccapurple", "darkviolet", "#8e24aa"),
    "black": ("black", "#111111"),
}
GROUNDS = ("white", "white", "white", "#f0f0f0", "lightgrey", "ivory", "lightblue", "#dddddd")
SHAPES = ("circle", "square", "triangle", "star")
WORDS = ("none", "one", "two", "three", "four", "five", "six")
ASKED = ("count", "colour", "shape", "existence", "description")


@dataclass(frozen=True)
class Item:
    """Hold a drawn shape: its middle and radius in pixels."""

    colour: str
    shape: str
    x: float
    y: float
    radius: float


@dataclass(frozen=True)
class Question:
    """Hold a question and its answer: a word, or the counts of (colour, shape)."""

    kind: str
    text: str
    answer: str | Counter[tuple[str, str]]


@dataclass(frozen=True)
class Example:
    """Hold a picture, what is on it, and questions about it."""

    image: Image.Image
    items: tuple[Item, ...]
    questions: tuple[Question, ...]


def _points(item: Item) -> list[tuple[float, float]]:
    tips = {"triangle": 3, "star": 10}[item.shape]
    found = []
    for tip in range(tips):
        reach = item.radius * (0.4 if item.shape == "star" and tip % 2 else 1.0)
        angle = 2 * math.pi * tip / tips - math.pi / 2
        found.append((item.x + reach * math.cos(angle), item.y + reach * math.sin(angle)))
    return found


def _draw(pen: ImageDraw.ImageDraw, item: Item, fill: str, outline: str | None, width: int) -> None:
    side = item.radius if item.shape == "circle" else 0.8 * item.radius
    box = (item.x - side, item.y - side, item.x + side, item.y + side)
    if item.shape == "circle":
        pen.ellipse(box, fill=fill, outline=outline, width=width)
    elif item.shape == "square":
        pen.rectangle(box, fill=fill, outline=outline, width=width)
    else:
        pen.polygon(_points(item), fill=fill, outline=outline, width=width)


def _items(rng: Random, count: int, width: int, height: int) -> tuple[Item, ...]:
    """Place shapes without overlap; ever smaller ones until all find room."""
    share = rng.uniform(0.1, 0.2)
    while True:
        placed: list[Item] = []
        for _ in range(200):
            radius = max(share * min(width, height) * rng.uniform(0.8, 1.2), 4.0)
            x, y = rng.uniform(radius, width - radius), rng.uniform(radius, height - radius)
            if all(math.hypot(x - o.x, y - o.y) > radius + o.radius + 1 for o in placed):
                placed.append(Item(rng.choice(list(COLOURS)), rng.choice(SHAPES), x, y, radius))
            if len(placed) == count:
                return tuple(placed)
        share *= 0.9


def example(number: int) -> Example:
    """Return held-out picture `number`."""
    rng = Random(f"pillow {number}")
    side = rng.choice((24, 32, 48, 64, 100, 128, 200, 256, 400, 512, 800, 1024))
    aspect = rng.choice((1.0, 1.0, 1.0, 4 / 3, 3 / 4, 16 / 10))
    width, height = round(side * min(1.0, aspect)), round(side * min(1.0, 1 / aspect))
    count = 1 + number % 6 if min(width, height) >= 48 else 1 + number % 2
    fold = rng.choice((1, 1, 4))  # Pillow draws hard edges; some people draw larger and shrink
    items = _items(rng, count, width, height)
    ground = rng.choice(GROUNDS)
    image = Image.new("RGB", (width * fold, height * fold), ground)
    pen = ImageDraw.Draw(image)
    outline = rng.choice((None, None, None, "black", "dimgrey"))
    for item in items:
        big = Item(item.colour, item.shape, item.x * fold, item.y * fold, item.radius * fold)
        line = max(fold, round(big.radius / 12)) if outline else 0
        fill = rng.choice(COLOURS[item.colour])
        if sum(abs(a - b) for a, b in zip(_rgb(fill), _rgb(ground), strict=True)) < 90:
            fill = COLOURS[item.colour][1]
        _draw(pen, big, fill, outline, line)
    image = image.resize((width, height), Image.Resampling.LANCZOS) if fold > 1 else image
    if rng.random() < 0.3:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=rng.choice((60, 80, 90)))
        image = Image.open(file).convert("RGB")
    return Example(image, items, questions(items, rng))


def _rgb(name: str) -> tuple[int, ...]:
    return ImageColor.getrgb(name)[:3]


def questions(items: tuple[Item, ...], rng: Random) -> tuple[Question, ...]:
    """Return a question of each kind that the picture allows."""
    shapes, colours = Counter(i.shape for i in items), Counter(i.colour for i in items)
    found = []
    shape = rng.choice(list(shapes)) if rng.random() < 0.7 else rng.choice(SHAPES)
    found.append(Question("count", f"How many {shape}s are there?", WORDS[shapes[shape]]))
    for single in (s for s in shapes if shapes[s] == 1):
        colour = next(i.colour for i in items if i.shape == single)
        found.append(Question("colour", f"What colour is the {single}?", colour))
        break
    for single in (c for c in colours if colours[c] == 1):
        shape = next(i.shape for i in items if i.colour == single)
        found.append(Question("shape", f"What shape is the {single} thing?", shape))
        break
    one = rng.choice(items)
    shape = one.shape if rng.random() < 0.5 else rng.choice(SHAPES)
    there = any((i.colour, i.shape) == (one.colour, shape) for i in items)
    article = "an" if one.colour[0] in "aeiou" else "a"
    text = f"Is there {article} {one.colour} {shape}?"
    found.append(Question("existence", text, "yes" if there else "no"))
    things = Counter((i.colour, i.shape) for i in items)
    found.append(Question("description", "What do you see?", things))
    return tuple(found)


def right(question: Question, reply: str) -> bool:
    """Return True for a right reply: the expected word, or all things and no others.

    Sizes and the order of things are not judged.
    """
    words = reply.lower().replace(",", " ").replace(".", " ").replace(":", " ").split()
    if isinstance(question.answer, str):
        told = [word for word in words if word not in ("a", "an", "the")]
        return told == [question.answer]
    found: Counter[tuple[str, str]] = Counter()
    many, colour = 1, ""
    for word in words:
        shape = word.removesuffix("s")
        if word in ("a", "an"):
            many = 1
        elif word in WORDS:
            many = WORDS.index(word)
        elif word in COLOURS:
            colour = word
        elif shape in SHAPES:
            found[colour, shape] += many
    return found == question.answer
