"""How a prefix cache knows that it is too small."""

from __future__ import annotations

from motet_llm.cache.ghost_cache import GhostCache
from motet_shared.text.prefixes import ROOT, chain

SIZE = 4
PROMPT = list(range(16))


def lost(ghosts: GhostCache, prompt: list[int]) -> None:
    for called in chain(prompt, SIZE):
        ghosts.note(called, False)


def test_only_what_was_there_counts() -> None:
    ghosts = GhostCache(100)
    ghosts.count(ROOT, PROMPT, SIZE)
    assert ghosts.recomputed == 0
    lost(ghosts, PROMPT)
    ghosts.count(ROOT, [*PROMPT, 99, 98, 97, 96], SIZE)
    assert ghosts.recomputed == 16
    ghosts.count(ROOT, [5, *PROMPT], SIZE)
    assert ghosts.recomputed == 16, "the same tokens elsewhere are others"


def test_what_follows_a_cached_part_counts() -> None:
    ghosts = GhostCache(100)
    lost(ghosts, PROMPT)
    first, second, *_ = chain(PROMPT, SIZE)
    ghosts.note(first, True)
    ghosts.note(second, True)
    ghosts.count(second, PROMPT[8:], SIZE)
    assert ghosts.recomputed == 8
    ghosts.count(ROOT, PROMPT, SIZE)
    assert ghosts.recomputed == 8, "what has come back is not lost"


def test_it_remembers_twice_the_cache() -> None:
    ghosts = GhostCache(2)
    lost(ghosts, list(range(20)))  # five blocks, of which it keeps four
    ghosts.count(ROOT, list(range(20)), SIZE)
    assert ghosts.recomputed == 0
    ghosts.count(chain(list(range(20)), SIZE)[0], list(range(4, 20)), SIZE)
    assert ghosts.recomputed == 16
