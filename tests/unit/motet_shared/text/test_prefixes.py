"""What blocks of prompts are called."""

from __future__ import annotations

import random

from motet_shared.text import prefixes


def test_a_chain_names_every_whole_block_by_all_that_leads_to_it() -> None:
    names = list(range(50))
    called = prefixes.chain(names, 16)
    assert len(called) == 3
    assert len(set(called)) == 3
    assert prefixes.chain(names[:40], 16) == called[:2]
    other = prefixes.chain([7, *names[1:]], 16)
    assert not set(other) & set(called), "the first token is in every name"
    assert prefixes.chain(names[16:48], 16) != called[1:]
    assert prefixes.chained(called[0], names[16:32]) == called[1]
    assert prefixes.chain([1, 2], 16) == []


def test_names_do_not_depend_on_the_process() -> None:
    """Workers and tokenizers agree, whatever the seed of their hashes."""
    assert prefixes.chain(range(4), 2) == [7804964254405891300, 11990419772136237205]


def test_tokens_of_pictures_are_called_unlike_any_token() -> None:
    first, second = (prefixes.picture_names(name, 600) for name in ("cat", "dog"))
    assert len({*first, *second}) == 1200
    assert max(first + second) < 0
    prompt = [5, 9, 9, 6, 9]
    named = prefixes.prompt_names(prompt, {9}, [("cat", 2), ("dog", 1)])
    assert named == [5, *first[:2], 6, second[0]]
    assert prefixes.chain(named, 2) != prefixes.chain(prompt, 2)
    assert prefixes.prompt_names([1, 2], {9}, []) == [1, 2]


def test_names_hardly_ever_meet() -> None:
    rng = random.Random(0)
    blocks = {tuple(rng.randrange(1 << 17) for _ in range(4)) for _ in range(20_000)}
    assert len({prefixes.chained(prefixes.ROOT, block) for block in blocks}) == len(blocks)
