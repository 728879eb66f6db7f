"""Cluster vectors by agglomeration: average cosine linkage, down to a threshold.

In plain Python, as this package does not depend on numpy; so of many vectors only a sample is
compared pairwise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import mul

Vector = Sequence[float]

MOST = 240  # vectors compared pairwise, which takes about 0.25 s


def cosine(one: Vector, other: Vector) -> float:
    """Return the cosine of two unit vectors."""
    value: float = sum(map(mul, one, other))
    return value


def mean(vectors: Sequence[Vector], weights: Sequence[float] | None = None) -> list[float]:
    """Return the weighted mean direction as a unit vector; zeros where the vectors cancel out."""
    given = weights or [1.0] * len(vectors)
    total = [sum(map(mul, column, given)) for column in zip(*vectors, strict=True)]
    length = math.sqrt(cosine(total, total))
    return [value / length for value in total] if length > 0 else total


def cluster(vectors: Sequence[Vector], weights: Sequence[float], threshold: float) -> list[int]:
    """Return a cluster number per vector: 0, 1, … by first appearance.

    `weights`: how much each vector counts (seconds of speech). `threshold`: the average cosine from
    which two clusters are merged. Of more than MOST vectors, an evenly spaced sample forms the
    clusters and the others join the nearest; those near none of them form further clusters. Blocks
    for up to a second: run it in a thread.
    """
    members: list[list[int]] = []
    left = list(range(len(vectors)))
    while left:
        some = left[:: math.ceil(len(left) / MOST)]
        groups = _merge(
            [vectors[index] for index in some], [weights[index] for index in some], threshold
        )
        members += [[some[place] for place in group] for group in groups]
        centres = [
            mean([vectors[i] for i in group], [weights[i] for i in group]) for group in members
        ]
        taken = set(some)
        far: list[int] = []
        for index in left:
            if index in taken:
                continue
            best, similarity = nearest(vectors[index], centres)
            (members[best] if similarity >= threshold else far).append(index)
        left = far
    return _numbered(members, len(vectors))


def _numbered(members: list[list[int]], count: int) -> list[int]:
    found = [0] * count
    for number, group in enumerate(sorted(members, key=min)):
        for index in group:
            found[index] = number
    return found


def nearest(vector: Vector, centres: Sequence[Vector]) -> tuple[int, float]:
    """Return the index of the nearest centre, and its cosine."""
    cosines = [cosine(vector, centre) for centre in centres]
    best = max(range(len(centres)), key=cosines.__getitem__)
    return best, cosines[best]


def _merge(
    vectors: Sequence[Vector], weights: Sequence[float], threshold: float
) -> list[list[int]]:
    """Return groups of indices, merged while the average cosine is high enough.

    The average cosine of a merged group follows from those of its parts (Lance and Williams).
    """
    groups = [[index] for index in range(len(vectors))]
    heavy = [max(weight, 1e-6) for weight in weights]
    table = [[cosine(one, other) for other in vectors] for one in vectors]
    live = list(range(len(vectors)))
    best = {i: max((j for j in live if j != i), key=table[i].__getitem__, default=i) for i in live}
    while len(live) > 1:
        left = max(live, key=lambda i: table[i][best[i]])
        right = best[left]
        if table[left][right] < threshold:
            break
        live.remove(right)
        groups[left] += groups[right]
        share = heavy[left] / (heavy[left] + heavy[right])
        heavy[left] += heavy[right]
        for other in live:
            joined = share * table[left][other] + (1 - share) * table[right][other]
            table[left][other] = table[other][left] = joined
        for i in live:
            if i == left or best[i] in (left, right):
                best[i] = max((j for j in live if j != i), key=table[i].__getitem__, default=i)
            elif table[i][left] > table[i][best[i]]:
                best[i] = left
    return [groups[index] for index in live]
