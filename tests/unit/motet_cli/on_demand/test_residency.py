"""Which models are in memory: what is loaded, what leaves, and in which order."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from motet_cli.on_demand.residency import MIN_STAY, RETRY_AFTER, Model, Residency

LATER = MIN_STAY + 1


def ready(name: str, size: int = 1, *, used: float = 0.0, active: int = 0) -> Model:
    return Model(name=name, size=size, stage="ready", used=used, active=active)


def wanted(name: str, size: int = 1, since: float = 0.0) -> Model:
    return Model(name=name, size=size, wanted=1, wanted_since=since)


def decided(models: list[Model], memory: int, now: float = LATER, most: int = 0) -> list[str]:
    """Return the decisions in words such as `load a`."""
    residency = Residency(models, memory, most)
    return [f"{action} {model.name}" for action, model in residency.decide(now)]


def test_what_fits_is_loaded_beside_the_others() -> None:
    assert decided([ready("a"), wanted("b"), Model(name="c", size=1)], 2) == ["load b"]


def test_the_least_recently_used_leaves_and_one_without_streams_first() -> None:
    models = [ready("a", used=1, active=1), ready("b", used=3), ready("c", used=2), wanted("d")]
    assert decided(models, 3, now=9) == ["unload c"]
    assert models[3].stage == "clearing"
    busy = [ready("a", used=2, active=1), ready("b", used=1, active=1), wanted("c")]
    assert decided(busy, 2, now=9) == ["unload b"]


def test_only_as_many_leave_as_are_needed_and_none_twice() -> None:
    models = [ready("a", 2, used=1), ready("b", 2, used=2), ready("c", 2, used=3), wanted("d", 3)]
    residency = Residency(models, 6)
    assert [model.name for _, model in residency.decide(9)] == ["a", "b"]
    assert residency.decide(10) == []
    models[0].enter("absent", 11)
    assert residency.decide(11) == []
    models[1].enter("absent", 12)
    assert residency.decide(12) == [("load", models[3])]


def test_one_that_follows_starts_while_others_end() -> None:
    """Its processes wait for the memory themselves; streams are waited for before."""
    idle, busy = ready("a", used=1), ready("b", used=2, active=1)
    following = wanted("c")
    following.follows = True
    assert decided([idle, busy, following], 2, now=9) == ["unload a", "load c"]
    assert [idle.stage, following.stage] == ["leaving", "loading"]
    later = wanted("d", since=9)
    later.follows = True
    residency = Residency([idle, busy, following, later], 2)
    assert [model.name for _, model in residency.decide(10)] == ["b"]  # its stream goes on
    assert later.stage == "clearing"
    busy.note(0, 0, 11)
    assert residency.decide(11) == [("load", later)]


def test_a_limit_of_numbers_counts_beside_memory() -> None:
    assert decided([ready("a"), wanted("b")], 100, most=1) == ["unload a"]


def test_what_was_asked_for_first_is_loaded_first() -> None:
    models = [ready("a", 4, active=1), wanted("large", 4, since=1), wanted("small", 1, since=2)]
    assert decided(models, 5, now=9) == ["unload a"]
    assert [model.stage for model in models] == ["leaving", "clearing", "queued"]


def test_one_that_is_too_large_is_tried_alone() -> None:
    assert decided([wanted("a", 9)], 5) == ["load a"]


def test_a_model_that_has_just_become_ready_stays() -> None:
    fresh = ready("a")
    fresh.changed = 10.0
    assert decided([fresh, wanted("b")], 1, now=10.0 + MIN_STAY / 2) == []
    assert decided([fresh, wanted("b")], 1, now=10.0 + MIN_STAY) == ["unload a"]


def test_keep_alive_counts_from_the_last_request() -> None:
    model = Model(name="a", size=1, keep_alive=5, stage="ready", used=10)
    assert decided([model], 1, now=14.9) == []
    model.active = 1
    assert decided([model], 1, now=99) == []
    model.active = 0
    assert decided([model], 1, now=15) == ["unload a"]


def test_requests_that_are_gone_load_nothing() -> None:
    models = [ready("a", active=1), wanted("b")]
    residency = Residency(models, 1)
    residency.decide(9)
    models[1].note(0, 0, 10)
    models[0].enter("absent", 10)
    assert residency.decide(10) == []
    assert models[1].stage == "absent"


def test_a_failed_start_is_tried_again_later() -> None:
    model = wanted("a")
    model.enter("failed", 1.0)
    assert decided([model], 1, now=RETRY_AFTER) == []
    assert decided([model], 1, now=1 + RETRY_AFTER) == ["load a"]


REQUEST = st.tuples(st.integers(0, 5), st.integers(1, 4))  # model, seconds of its stream


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 4), min_size=6, max_size=6),
    st.lists(REQUEST, max_size=25),
    st.integers(4, 8),
    st.booleans(),
)
def test_every_request_is_served_within_the_memory(
    sizes: list[int], requests: list[tuple[int, int]], memory: int, follows: bool
) -> None:
    """A request arrives each second; loads take two, and a model that leaves goes once it is idle."""
    models = [
        Model(name=str(i), size=size, keep_alive=7, follows=follows) for i, size in enumerate(sizes)
    ]
    residency = Residency(models, memory)
    waiting: dict[str, list[int]] = {model.name: [] for model in models}
    running: dict[str, list[float]] = {model.name: [] for model in models}
    served, now = 0, 0.0
    arrivals = list(requests)
    while (arrivals or served < len(requests)) and now < 1000:
        now += 1
        if arrivals:
            index, seconds = arrivals.pop(0)
            waiting[str(index)].append(seconds)
        for model in models:
            ends = running[model.name] = [end for end in running[model.name] if end > now]
            if model.stage == "loading" and now - model.changed >= 2:
                model.enter("ready", now)
            if model.stage == "leaving" and not ends:
                model.enter("absent", now)
            if model.stage == "ready":
                served += len(waiting[model.name])
                ends += [now + seconds for seconds in waiting[model.name]]
                waiting[model.name].clear()
            model.note(len(waiting[model.name]), len(ends), now)
        residency.decide(now)
        held = [model for model in models if model.occupies and not (follows and model.is_ending)]
        assert sum(model.size for model in held) <= memory
    assert served == len(requests)


def test_what_a_client_asked_for_counts_until_the_model_is_unloaded() -> None:
    model = Model(name="a", size=1, keep_alive=5, stage="ready", used=10, asked=60.0)
    assert decided([model], 1, now=16) == []
    assert model.left(16) == 54
    model.asked = 0.0
    assert decided([model], 1, now=16) == ["unload a"]
    model.enter("absent", 17)
    assert (model.asked, model.stay) == (None, 5)
