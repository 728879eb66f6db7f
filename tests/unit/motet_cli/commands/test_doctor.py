"""Test the rules of `motet doctor` over heartbeats, the gateway's history, and the report."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from motet_cli.commands import doctor
from motet_cli.main import main
from motet_doctor import Finding, Layer, ObservationWindow, Snapshot, diagnose
from motet_doctor.rules import NAMES
from motet_gateway.http.readers import PATIENCE, SlowReaders
from motet_gateway.operations.heartbeat_history import LONGEST, HeartbeatHistory
from motet_shared.messages import Heartbeat
from motet_shared.testing import memory_buses
from motet_shared.wire.discovery import HEARTBEAT_EVERY
from support.services.doctor_cases import CASES, DECODING, MACHINE, QUIET, healthy, instance, window


def names(seen: ObservationWindow) -> list[str]:
    return [finding.name for finding in diagnose(seen)]


def test_a_quiet_stack_is_healthy() -> None:
    assert diagnose(window(*healthy())) == []
    assert diagnose(ObservationWindow.of([])) == []


@pytest.mark.parametrize("name", NAMES)
def test_each_shortage_is_named_alone(name: str) -> None:
    stack, layer = CASES[name]
    (finding,) = diagnose(window(*stack))
    assert (finding.name, finding.layer, finding.layer_name) == (name, layer.name, layer.value)
    assert finding.where
    assert finding.numbers
    assert finding.knob


def test_findings_are_sorted_by_cost() -> None:
    slow = instance("gateway-1", unread_replies=1.0, streams=50.0)
    few = instance("decode-1", active=50.0, queued=40.0)
    findings = diagnose(window(*healthy(gateway=slow, decode=few)))
    assert [(f.name, f.severity) for f in findings] == [
        ("too_few_decode", "critical"),
        ("slow_client", "warning"),
    ]


def test_a_queue_for_blocks_is_no_lack_of_instances() -> None:
    assert names(window(*healthy(decode=instance("decode-1", queued=5.0, kv_free=0.01)))) == [
        "cache_too_small"
    ]


def test_a_queue_at_one_of_two_is_no_lack_of_instances() -> None:
    """Expect no finding of a hot instance either, since both have as many active requests."""
    pair = [
        instance("decode-1", active=5.0, queued=3.0),
        instance("decode-2", active=5.0, queued=0.0),
    ]
    assert diagnose(window(instance("tokenizer-1"), *pair)) == []


def test_missing_decode_is_diagnosed_from_waiting_requests() -> None:
    (finding,) = diagnose(
        window(instance("tokenizer-1", "ready", "m", **{"waiting_for_decode/m": 3.0}))
    )
    assert (finding.name, finding.knob) == ("too_few_decode", "motet scale decode=1")


def test_the_remedy_on_a_full_machine_is_another_machine() -> None:
    full = instance("decode-1", queued=5.0, cpu=3.9, machine_cpu=4.0)
    (finding,) = diagnose(window(*healthy(decode=full)))
    assert "on another machine" in finding.knob


def test_a_starved_gateway_is_not_overloaded() -> None:
    starved = instance(
        "gateway-1", cpu=0.2, cpu_wait=0.7, loop_cpu=0.2, loop_wait=0.7, machine_cpu=3.0
    )
    assert names(window(*healthy(gateway=starved))) == ["cpu_neighbour"]


def test_slow_encoding_is_diagnosed_from_replies() -> None:
    encoding = [{"gateway.first": 1.0, "tokenizer.encode": 0.8}] * 3
    busy = instance("tokenizer-1", cpu=0.8, loop_cpu=0.1, machine_cpu=1.5)
    assert names(window(*healthy(tokenizer=busy), timings=encoding)) == ["tokenizer_bound"]
    assert names(window(*healthy(tokenizer=busy))) == []


def test_a_restarted_instance_starts_from_zero() -> None:
    before = instance("decode-1", recomputed_tokens=1e6)[1]
    after = instance("decode-2")[0]
    assert diagnose(ObservationWindow.of([Snapshot(0.0, [before]), Snapshot(10.0, [after])])) == []


Load = dict[str, float]
numbers = st.floats(min_value=0.0, max_value=1e12)
keys = sorted(
    {
        *QUIET,
        *DECODING,
        *MACHINE,
        "queued",
        "running",
        "active",
        "unread",
        "unread_replies",
        "streams",
        "kv_free",
    }
)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["gateway", "tokenizer", "decode", "tts"]),
            st.dictionaries(
                st.sampled_from([*keys, "recomputed_tokens", "mixed_tokens", "kv_bytes"]), numbers
            ),
            st.dictionaries(st.sampled_from(keys), numbers),
            st.sampled_from(["ready", "warming", "draining"]),
        ),
        max_size=4,
    )
)
def test_findings_are_valid_for_any_heartbeats(
    heartbeats: list[tuple[str, dict[str, float], dict[str, float], str]],
) -> None:
    beats = [
        [
            Heartbeat(
                v=2, role=role, instance=f"{role}-{i}", state=state, seq=n, load=load, models=[]
            )
            for n, load in enumerate((first, last))
        ]
        for i, (role, first, last, state) in enumerate(heartbeats)
    ]
    findings = diagnose(window(*beats))
    assert [f.cost for f in findings] == sorted((f.cost for f in findings), reverse=True)
    for finding in findings:
        assert finding.name in NAMES
        assert finding.layer in Layer.__members__
        assert set(finding.where) <= {one[0].instance for one in beats}
        assert all(value == value for value in finding.numbers.values()), "no NaN"


# ----------------------------------------------------------------------------------------------- what gateways remember
async def test_history_is_dense_at_its_end_and_sparse_before() -> None:
    async with memory_buses("gateway", "tokenizer") as (gateway, tokenizer):
        history = HeartbeatHistory(gateway.directory)
        assert history.last(10.0) == []
        assert history.seconds(10.0) == 0.0
        for _ in range(1200):  # two minutes
            await history.tick(0.1)
        assert history.seconds(5.0) == pytest.approx(5.0, abs=HEARTBEAT_EVERY + 0.1)
        assert LONGEST - 10 <= history.seconds(LONGEST) <= LONGEST + 1
        assert len(history.last(LONGEST)) < 40
        assert len(history.last(0.1)) == 2, "a look alone says nothing"
        times = [look.time for look in history.last(LONGEST)]
        assert times == sorted(times)
        assert {beat.instance for beat in history.last(1.0)[-1].heartbeats} == {
            gateway.instance,
            tokenizer.instance,
        }


def test_a_client_that_reads_nothing_is_slow() -> None:
    now = [0.0]
    readers = SlowReaders(lambda: now[0])
    with readers.waiting():
        now[0] = PATIENCE / 2
        with readers.waiting():
            assert readers.unwritten == 0
            now[0] = PATIENCE
            assert readers.unwritten == 1
    assert readers.unwritten == 0


# ---------------------------------------------------------------------------------------------------------- the command
def shown(heartbeats: dict[str, Any]) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(doctor.report(heartbeats))
    return console.export_text()


def test_the_report_shows_all_fields() -> None:
    finding = Finding(
        name="too_few_decode",
        what="Requests wait.",
        layer="L4",
        layer_name="fleet",
        resource="decode instances",
        where=["decode-1", "decode-2"],
        numbers={"queued": 4.5},
        knob="motet scale decode=3",
        severity="critical",
        cost=4.5,
    )
    fields = {name: getattr(finding, name) for name in finding.__struct_fields__}
    text = shown({"window_seconds": 9.5, "findings": [fields]})
    for part in (
        "one resource is short in the last 9.5 s",
        "critical  L4 fleet",
        "decode-1, decode-2",
        "queued 4.5",
    ):
        assert part in text
    assert "motet scale decode=3" in text
    assert "healthy" in shown({"window_seconds": 9.5, "findings": []})


def test_an_unreachable_server_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--url", "http://127.0.0.1:9"]) == 2
    assert "http://127.0.0.1:9" in capsys.readouterr().err
    assert main(["doctor", "--window", "0"]) == 2
    assert "--window: 0" in capsys.readouterr().err
