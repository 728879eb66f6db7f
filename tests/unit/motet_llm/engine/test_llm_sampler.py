"""The sampler against a plain reference, one row and one filter at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from motet_kernels.sampling import sampling
from motet_kernels.sampling.choice import Choice
from motet_kernels.sampling.noise import gumbel, streams
from motet_kernels.sampling.sampling import filtered_candidates
from motet_llm.engine.request import Request, SeenTokens
from motet_llm.engine.sampler import edits_of, sample
from motet_llm.speculation.draft_request import DraftRequest
from motet_llm.speculation.speculative_row import SpeculativeRow
from motet_shared.messages import Sampling

VOCAB = 24
STOP = frozenset({3, 5})


def make_request(
    prompt: list[int] | None = None, output: list[int] | None = None, **sampling: Any
) -> Request:
    wish = Sampling(**sampling)
    return Request(
        "r", 0, prompt or [1], wish, output=output or [], stop_ids=STOP, max_length=10_000
    )


def make_logits(seed: int, rows: int = 1, vocab: int = VOCAB) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


# ----------------------------------------------------------------------------------------------------------- reference
def plain_edit(logits: np.ndarray, request: Request) -> np.ndarray:
    """Bias, min_tokens and penalties, token by token."""
    s, result = request.sampling, logits.astype(np.float64).copy()
    for token in range(len(result)):
        result[token] += s.logit_bias.get(token, 0.0)
        if request.num_output < s.min_tokens and token in request.stop_ids:
            result[token] = -np.inf
        if token in request.tokens:
            result[token] = (
                result[token] / s.repetition_penalty
                if result[token] > 0
                else result[token] * s.repetition_penalty
            )
        if token in request.output:
            result[token] -= s.presence_penalty + s.frequency_penalty * request.output.count(token)
    return result


def plain_probs(logits: np.ndarray, s: Sampling) -> np.ndarray:
    """Temperature, top-k, top-p, min-p, each over what the one before left."""

    def normalized(kept: list[int]) -> dict[int, float]:
        weights = {t: math.exp((logits[t] - logits.max()) / s.temperature) for t in kept}
        return {t: w / sum(weights.values()) for t, w in weights.items()}

    ranked = sorted(range(len(logits)), key=lambda t: -logits[t])
    probs = normalized(ranked[: s.top_k] if s.top_k else ranked)
    kept: list[int] = []
    mass = 0.0
    for token, prob in probs.items():
        if kept and s.top_p < 1 and mass >= s.top_p:
            break
        kept.append(token)
        mass += prob
    probs = normalized(kept)
    probs = normalized([t for t in kept if t == kept[0] or probs[t] >= s.min_p * probs[kept[0]]])
    return np.array([probs.get(t, 0.0) for t in range(len(logits))])


filters: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    temperature=st.floats(0.2, 2.0),
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.one_of(st.just(1.0), st.floats(0.05, 0.99)),
    min_p=st.one_of(st.just(0.0), st.floats(0.01, 0.9)),
)
edits: st.SearchStrategy[dict[str, Any]] = st.builds(
    dict,
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.5, 2),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-20, 20), max_size=4),
    min_tokens=st.integers(0, 6),
)
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=8)


# ------------------------------------------------------------------------------------------------- filters, penalties
@example(seed=0, wish={"temperature": 2.0, "top_k": 5, "top_p": 0.5, "min_p": 0.0}, narrow=4)
@given(seed=st.integers(0, 1000), wish=filters, narrow=st.sampled_from([1, 4, 256]))
def test_filters_keep_what_the_reference_keeps(
    seed: int, wish: dict[str, Any], narrow: int
) -> None:
    logits, s = make_logits(seed), Sampling(**wish)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "FIRST_CANDIDATES", narrow)
        scaled_RC, tokens_RC = filtered_candidates(
            logits, [Choice(s.temperature, s.top_k, s.top_p, s.min_p)]
        )
    ours = np.zeros(VOCAB)
    ours[tokens_RC[0].numpy()] = scaled_RC[0].softmax(-1).numpy()
    expected = plain_probs(logits[0].double().numpy(), s)
    if not np.allclose(
        ours, expected, atol=1e-5
    ):  # a cut may fall either way where it is hit to the last digit
        nudged = [plain_probs(logits[0].double().numpy(), _nudge(s, by)) for by in (-1e-6, 1e-6)]
        assert any(np.allclose(ours, other, atol=1e-5) for other in nudged)


def _nudge(s: Sampling, by: float) -> Sampling:
    return Sampling(
        temperature=s.temperature, top_k=s.top_k, top_p=s.top_p + by, min_p=s.min_p + by
    )


@given(seed=st.integers(0, 1000), wish=edits, prompt=tokens, output=tokens)
def test_bias_and_penalties_are_the_reference_s(
    seed: int, wish: dict[str, Any], prompt: list[int], output: list[int]
) -> None:
    logits = make_logits(seed)
    before = logits.clone()
    request = make_request([0, *prompt], output, **wish)
    edits = edits_of([request])
    edited = logits if edits is None else sampling.edit(logits, edits)
    assert torch.equal(logits, before)
    np.testing.assert_allclose(edited[0].numpy(), plain_edit(logits[0].numpy(), request), atol=1e-4)


@given(prompt=st.lists(st.integers(0, 9), min_size=1), drawn=st.lists(st.integers(0, 9)))
def test_distinct_tokens_are_those_of_the_list(prompt: list[int], drawn: list[int]) -> None:
    request = make_request(prompt)
    draft = DraftRequest(request)
    for token in drawn:
        request.append(token)
        assert request.distinct.tolist() == sorted(set(request.tokens))
        row = SpeculativeRow(request, (7, 3, 7))
        assert row.distinct.tolist() == sorted(set(row.tokens))
        draft.synchronize(3)
        for guess in (token, 11, 2):
            draft.extend(guess)
            assert draft.distinct.tolist() == sorted(set(draft.tokens))
        assert request.distinct.tolist() == sorted(set(request.tokens))


def test_a_token_is_read_once() -> None:
    tokens, seen = [4, 2, 4], SeenTokens()
    assert seen.of(tokens).tolist() == [2, 4]
    tokens[0] = 9
    tokens.append(3)
    assert seen.of(tokens).tolist() == [2, 3, 4]


def test_rows_do_not_mix() -> None:
    """A batch of unlike rows draws what each row draws alone."""
    wishes: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 4},
        {"temperature": 0.8, "top_k": 5, "seed": 5},
        {"temperature": 1.3, "top_p": 0.7, "seed": 6, "frequency_penalty": 1.0},
        {"temperature": 1.0, "min_p": 0.2, "seed": 7, "logit_bias": {2: 5.0}},
        {"temperature": 0, "repetition_penalty": 1.5},
    ]
    requests = [make_request([1, 2], [3, 3, 4], **wish) for wish in wishes]
    logits = make_logits(0, rows=len(requests), vocab=1000)
    together = sample(logits, requests).ids
    alone = [sample(logits[i : i + 1], [request]).ids[0] for i, request in enumerate(requests)]
    assert together == alone


def test_temperature_zero_takes_the_most_likely_token() -> None:
    logits = make_logits(1, rows=3)
    requests = [make_request(temperature=0, top_p=0.1, seed=i) for i in range(3)]
    assert sample(logits, requests).ids == logits.argmax(-1).tolist()


def test_stop_tokens_cannot_come_before_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 3] = 50.0
    assert (
        sample(logits, [make_request(output=[9], temperature=0, min_tokens=2)]).ids[0] not in STOP
    )
    assert sample(logits, [make_request(output=[9, 9], temperature=0, min_tokens=2)]).ids == [3]


# --------------------------------------------------------------------------------------------------------------- noise
def test_draws_follow_the_distribution() -> None:
    """Chi-square over 20,000 positions, fixed seed: 11 degrees of freedom, 99.9% lie below 31.3."""
    logits = make_logits(2, vocab=12) / 2
    positions = list(range(20_000))
    noise = gumbel(
        streams([123] * len(positions), positions), torch.arange(12).expand(len(positions), 12)
    )
    drawn = torch.bincount((logits + noise).argmax(-1), minlength=12).double()
    expected = logits[0].double().softmax(-1) * len(positions)
    assert float(((drawn - expected) ** 2 / expected).sum()) < 31.3


@pytest.mark.parametrize("axis", ["seed", "position"])
def test_noise_is_uncorrelated_along_seeds_and_positions(axis: str) -> None:
    lots = list(range(4000))
    seeds, positions = (lots, [0] * 4000) if axis == "seed" else ([0] * 4000, lots)
    noise = gumbel(streams(seeds, positions), torch.arange(8).expand(4000, 8)).double()
    correlations = torch.corrcoef(torch.cat([noise[:-1], noise[1:]], dim=1).T) - torch.eye(16)
    assert float(correlations.abs().max()) < 0.08
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.03)  # Euler's constant
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.06)


def plain_gumbel(seed: int, position: int, token: int) -> float:
    """The generator in Python's integers, which have no width to wrap at."""
    golden, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1

    def mix(x: int) -> int:
        x &= mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    stream = mix(mix(seed + golden) + position * golden)
    return -math.log(-math.log(((mix(stream + (token + 1) * golden) >> 41) + 0.5) / (1 << 23)))


@given(
    seed=st.integers(-(1 << 70), 1 << 70),
    position=st.integers(0, 1 << 20),
    tokens=st.lists(st.integers(0, 200_000)),
)
def test_noise_depends_on_nothing_but_seed_position_and_token(
    seed: int, position: int, tokens: list[int]
) -> None:
    noise = gumbel(
        streams([0, seed], [0, position]), torch.tensor([tokens, tokens], dtype=torch.long)
    )
    assert noise[1].tolist() == pytest.approx(
        [plain_gumbel(seed, position, t) for t in tokens], rel=1e-4, abs=1e-4
    )


# --------------------------------------------------------------------------------------------------- log-probabilities
def test_logprobs_are_of_the_model_s_own_distribution() -> None:
    logits = make_logits(3)
    request = make_request(temperature=0, logprobs=3, logit_bias={7: 100.0})
    result = sample(logits, [request])
    entry = result.logprobs[0]
    assert entry is not None
    assert (entry.id, result.ids) == (7, [7])
    expected = logits[0].log_softmax(-1)
    assert entry.logprob == pytest.approx(float(expected[7]), abs=1e-6)
    best = expected.topk(3)
    assert [token for token, _ in entry.top] == best.indices.tolist()
    assert [value for _, value in entry.top] == pytest.approx(best.values.tolist())


def test_no_logprobs_unless_asked_for() -> None:
    assert sample(make_logits(4), [make_request(temperature=0)]).logprobs == [None]
    entry = sample(make_logits(4), [make_request(temperature=0, logprobs=0)]).logprobs[0]
    assert entry is not None
    assert entry.top == []


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_draws_nothing_and_spares_the_others(
    bad: float, temperature: float
) -> None:
    logits = make_logits(5, rows=3)
    requests = [make_request(temperature=temperature, seed=i, logprobs=1) for i in range(3)]
    before = sample(logits, requests).ids
    logits[1, 2] = bad
    result = sample(logits, requests)
    assert result.ids == [before[0], None, before[2]]
    assert result.logprobs[1] is None
