"""Test the workloads of `motet bench`: lengths, arrivals, prefixes, traces, and determinism by
seed.
"""

import itertools
import json
import statistics
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet_cli.bench import lengths
from motet_cli.bench.request import Request, Shape
from motet_cli.bench.tokens_per_word import TokensPerWord
from motet_cli.bench.trace import Trace
from motet_cli.bench.workload import Workload
from motet_shared.errors import ConfigError
from motet_shared.recorded_traffic import MOONCAKE_BLOCK

WORDS = TokensPerWord()


def workload(**fields: Any) -> Workload:
    drawn = {"input": "20", "output": "8", "prefix_length": "10"}
    drawn |= {name: fields.pop(name) for name in drawn if name in fields}
    parsed: Any = {name: lengths.parse(f"--{name}", text) for name, text in drawn.items()}
    return Workload(**{"seed": 0, **parsed, **fields})


def first_requests(generator: Workload, count: int, scale: TokensPerWord = WORDS) -> list[Request]:
    return list(itertools.islice(generator.requests(scale), count))


# --------------------------------------------------------------------------------------------------------- lengths
@given(st.integers(1, 500), st.integers(0, 500), st.integers())
def test_uniform_lengths_stay_within_bounds(low: int, more: int, seed: int) -> None:
    drawn = lengths.parse("--input", f"uniform:{low},{low + more}")
    assert low <= drawn.draw(Random(seed)) <= low + more


def test_lengths_follow_their_distribution() -> None:
    rng = Random(1)
    assert {lengths.parse("--input", "128").draw(rng) for _ in range(9)} == {128}
    assert {lengths.parse("--input", "uniform:1,3").draw(rng) for _ in range(99)} == {1, 2, 3}
    values = sorted(lengths.parse("--input", "lognormal:200,0.5").draw(rng) for _ in range(4001))
    assert statistics.median(values) == pytest.approx(200, rel=0.05)
    # One sigma above the median: exp(0.5) times it, for 84.1 % of the values.
    assert values[int(0.841 * 4001)] == pytest.approx(200 * 1.6487, rel=0.06)


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "-1", "1.5", "many", "nan", "inf", "1,2", "99999999999", "fixed", "normal:1,2"),
        *("uniform:1", "uniform:5,1", "uniform:1,2,3", "uniform:nan,2"),
        *("lognormal:0,1", "lognormal:9,-1", "lognormal:9,nan"),
    ],
)
def test_invalid_distributions_are_rejected(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        lengths.parse("--input", text)
    assert caught.value.param == "--input"
    assert repr(text) in caught.value.message


# -------------------------------------------------------------------------------------------------------- requests
def test_equal_seeds_give_equal_bodies() -> None:
    shape = Shape(endpoint="chat", model="m", extra={"top_k": 3})
    generator = workload(
        seed=7,
        input="lognormal:50,1",
        output="uniform:1,99",
        rate=5.0,
        prefix_share=0.5,
        prefixes=3,
    )
    first = [(r.arrival, shape.body(r)) for r in first_requests(generator, 50)]
    assert first == [(r.arrival, shape.body(r)) for r in first_requests(generator, 50)]
    assert first[:20] == [(r.arrival, shape.body(r)) for r in first_requests(generator, 20)], (
        "whatever their number"
    )
    other = first_requests(workload(seed=8, input="lognormal:50,1", rate=5.0), 50)
    assert not {body for _, body in first} & {shape.body(r) for r in other}
    warm = next(generator.requests(WORDS, "warm-up"))
    assert warm.prompt not in {r.prompt for r in first_requests(generator, 50)}


def test_bodies_contain_the_request() -> None:
    request = Request(0.0, "say this", 9)
    body = json.loads(
        Shape(endpoint="chat", model="m", temperature=0.5, extra={"top_k": 3}).body(request)
    )
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "say this"}],
        "max_tokens": 9,
        "temperature": 0.5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_k": 3,
    }
    plain = json.loads(
        Shape(endpoint="completions", model="m", extra={"max_tokens": 1}).body(request)
    )
    assert (plain["prompt"], plain["max_tokens"]) == ("say this", 1)


def test_arrivals() -> None:
    due = [request.arrival for request in first_requests(workload(rate=4.0, process="constant"), 5)]
    assert due == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])
    due = [request.arrival for request in first_requests(workload(rate=4.0), 4001)]
    gaps = [after - before for before, after in itertools.pairwise(due)]
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=0.06)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1), (
        "Poisson: as spread as they are long"
    )
    assert {request.arrival for request in first_requests(workload(), 9)} == {0.0}


def test_prefix_share_and_prefixes_are_respected() -> None:
    requests = first_requests(workload(prefix_share=0.5, prefixes=2), 400)
    longer = [r.prompt for r in requests if len(r.prompt.split()) == 30]
    assert len(longer) == pytest.approx(200, abs=40)
    assert len({" ".join(prompt.split()[:10]) for prompt in longer}) == 2
    assert len({" ".join(prompt.split()[10:]) for prompt in longer}) == len(longer)
    assert len(requests) == len(longer) + sum(len(r.prompt.split()) == 20 for r in requests)


def test_words_are_converted_to_tokens() -> None:
    scale = TokensPerWord.fit((8, 26), (72, 154))
    assert (scale.per_word, scale.overhead) == (2.0, 10.0)
    assert scale.words(128) == 59
    assert scale.words(128, with_overhead=False) == 64
    assert scale.words(3) == 1
    assert TokensPerWord.fit((8, 5), (72, 5)) == TokensPerWord(), "a server that counts nonsense"
    (request,) = first_requests(workload(input="128"), 1, scale)
    assert len(request.prompt.split()) == 59


# ---------------------------------------------------------------------------------------------------------- traces
def write(path: Path, *lines: Any) -> Path:
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return path


def test_traces_in_our_format(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        {"arrival": 3, "tokens": 5, "max_tokens": 2, "prefix": "a", "prefix_tokens": 4},
        {"arrival": 1.0, "prompt": "just this", "max_tokens": 7},
        "",
        {"arrival": 2, "tokens": 5, "max_tokens": 3, "prefix": "a", "prefix_tokens": 4},
    )
    trace = Trace(path, seed=0)
    first, second, third = trace.requests(WORDS)
    assert (first.arrival, first.prompt, first.max_tokens) == (0.0, "just this", 7)
    assert [second.arrival, third.arrival] == [1.0, 2.0]
    assert [r.arrival for r in trace.requests(WORDS, speed=4)] == [0.0, 0.25, 0.5]
    assert second.prompt.split()[:4] == third.prompt.split()[:4]
    assert second.prompt.split()[4:] != third.prompt.split()[4:]
    assert (len(second.prompt.split()), len(third.prompt.split())) == (9, 9)
    assert Trace(path, seed=0).requests(WORDS) == trace.requests(WORDS)
    assert Trace(path, seed=1).requests(WORDS)[1] != second


def test_mooncake_hashes_become_shared_prefixes(tmp_path: Path) -> None:
    path = write(
        tmp_path / "mooncake.jsonl",
        {"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 3000, "input_length": 1300, "output_length": 6, "hash_ids": [1, 2, 4]},
        {"timestamp": 2000, "input_length": 700, "output_length": 7, "hash_ids": [1, 9]},
        {"timestamp": 2500, "input_length": 600, "output_length": 8},
    )
    first, second, bare, third = Trace(path, seed=0).requests(WORDS)
    assert [r.arrival for r in (first, second, bare, third)] == [0.0, 1.0, 1.5, 2.0]
    assert [r.max_tokens for r in (first, second, bare, third)] == [5, 7, 8, 6]
    a, b, c = (r.prompt.split() for r in (first, second, third))
    assert [len(a), len(b), len(bare.prompt.split()), len(c)] == [1100, 700, 600, 1300]
    assert a[: 2 * MOONCAKE_BLOCK] == c[: 2 * MOONCAKE_BLOCK]
    assert a[: 2 * MOONCAKE_BLOCK + 1] != c[: 2 * MOONCAKE_BLOCK + 1] or a[-1] != c[len(a) - 1]
    assert a[:MOONCAKE_BLOCK] == b[:MOONCAKE_BLOCK]
    assert a[MOONCAKE_BLOCK : MOONCAKE_BLOCK + 50] != b[MOONCAKE_BLOCK : MOONCAKE_BLOCK + 50]


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("nonsense", "line 2"),
        ("[1]", "object"),
        ({"arrival": 0, "max_tokens": 1}, '"tokens"'),
        ({"arrival": 0, "max_tokens": 1, "tokens": 1, "prompt": "x"}, '"tokens"'),
        ({"arrival": -1, "max_tokens": 1, "tokens": 1}, '"arrival"'),
        ({"arrival": 0, "max_tokens": 0, "tokens": 1}, '"max_tokens"'),
        ({"arrival": 0, "max_tokens": 1, "tokens": "x"}, "$.tokens"),
        ({"arrival": 0, "max_tokens": 1, "tokens": 1, "prefix": "a"}, '"prefix_tokens"'),
        ({"arrival": 0, "max_tokens": 1, "prompt": ""}, '"prompt"'),
        ({"arrival": 0, "max_tokens": 1, "tokens": 1, "colour": 1}, "colour"),
        (
            {"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []},
            '"input_length"',
        ),
        ({"timestamp": 0, "input_length": 5}, "output_length"),
    ],
)
def test_malformed_lines_are_rejected(tmp_path: Path, line: Any, field: str) -> None:
    path = write(tmp_path / "t.jsonl", {"arrival": 0, "tokens": 5, "max_tokens": 2}, line)
    with pytest.raises(ConfigError) as caught:
        Trace(path, seed=0)
    assert caught.value.param == "--trace"
    assert "line 2" in caught.value.message
    assert field in caught.value.message


def test_empty_and_missing_traces_are_rejected(tmp_path: Path) -> None:
    for path in (write(tmp_path / "t.jsonl", "", "  "), tmp_path / "none.jsonl"):
        with pytest.raises(ConfigError) as caught:
            Trace(path, seed=0)
        assert caught.value.param == "--trace"
        assert path.name in caught.value.message
