"""Test which of the processes that an earlier supervisor has left are kept, replaced and ended."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from motet_cli.supervision.child import ChildSpec
from motet_cli.supervision.stack import FIXED
from motet_cli.survival import watchdog
from motet_cli.survival.identity import Identity
from motet_cli.survival.record import ProcessRecord, fingerprint
from motet_cli.survival.takeover import Takeover, decide


def spec(name: str, *argv: str, **changes: object) -> ChildSpec:
    role = name.partition("-")[0]
    return ChildSpec(name=name, role=role, argv=("run", role, *argv), **changes)  # type: ignore[arg-type]


def found(spec: ChildSpec, number: int = 1, *, leaving: bool = False) -> ProcessRecord:
    return ProcessRecord(
        identity=Identity(number, number),
        instance=f"{spec.role}-{number}",
        spec=spec,
        fingerprint=fingerprint(spec),
        leaving=leaving,
    )


def names(taken: Takeover) -> tuple[list[str], list[str], list[str], list[str]]:
    return (
        [spec.name for _, spec in taken.keep],
        [spec.name for _, spec in taken.replace],
        [one.spec.name for one in taken.end],
        [spec.name for spec in taken.start],
    )


def test_what_has_not_changed_is_kept() -> None:
    here = [spec("nats"), spec("gateway"), spec("decode")]
    assert names(decide(map(found, here), here, FIXED)) == (
        ["nats", "gateway", "decode"],
        [],
        [],
        [],
    )


def test_what_has_ended_is_started() -> None:
    wanted = [spec("gateway"), spec("decode")]
    assert names(decide([found(wanted[0])], wanted, FIXED)) == (["gateway"], [], [], ["decode"])


@pytest.mark.parametrize(
    "changed",
    [spec("decode", "--other"), spec("decode", env={"A": "b"}), spec("decode", gpus=("GPU-1",))],
    ids=["arguments", "environment", "place"],
)
def test_what_has_changed_is_replaced(changed: ChildSpec) -> None:
    taken = decide([found(spec("decode")), found(spec("vad"))], [changed, spec("vad")], FIXED)
    assert names(taken) == (["vad"], ["decode"], [], [])
    assert taken.replace[0][1] == changed


def test_fixed_roles_are_kept_whatever_they_are_started_with() -> None:
    here = [found(spec(role, "--old")) for role in FIXED]
    assert names(decide(here, [spec(role) for role in FIXED], FIXED))[0] == list(FIXED)
    assert watchdog.ROLE in FIXED


def test_added_instances_are_kept_with_their_siblings() -> None:
    """`motet scale` has added them, each in a place of its own."""
    place = {"gpus": ("GPU-2",), "env": {"CUDA_VISIBLE_DEVICES": "GPU-2"}}
    first = spec("decode", gpus=("GPU-1",), env={"CUDA_VISIBLE_DEVICES": "GPU-1"})
    second = spec("decode-2", **place)
    taken = decide([found(first), found(second, 2)], [first], FIXED)
    assert names(taken) == (["decode", "decode-2"], [], [], [])
    assert taken.keep[1][1] == second


def test_added_instances_of_other_settings_end() -> None:
    old, added = spec("decode", "--old"), spec("decode-2", "--old")
    assert names(decide([found(old), found(added, 2)], [spec("decode")], FIXED)) == (
        [],
        ["decode"],
        ["decode-2"],
        [],
    )


def test_a_restart_that_was_interrupted_is_completed() -> None:
    here = [found(spec("decode"), 1, leaving=True), found(spec("decode"), 2)]
    taken = decide(here, [spec("decode")], FIXED)
    assert taken.keep == [(here[1], spec("decode"))]
    assert taken.end == [here[0]]


def test_two_processes_of_one_name_become_one() -> None:
    here = [found(spec("decode"), 1), found(spec("decode"), 2)]
    taken = decide(here, [spec("decode")], FIXED)
    assert (taken.keep[0][0], taken.end) == (here[0], [here[1]])


# --------------------------------------------------------------------------------------------- fingerprints
def test_descriptors_and_places_do_not_count() -> None:
    one = spec("gateway", "--listen-fd", "7", fds=(7,))
    assert fingerprint(one) == fingerprint(spec("gateway", "--listen-fd", "9", fds=(9,)))
    assert fingerprint(one) == fingerprint(replace(one, name="gateway-2"))
    waits = replace(one, env={**one.env, "MOTET_WAIT_FOR_EXIT": "7:1"})  # loaded on demand
    assert fingerprint(one) == fingerprint(waits)
    assert fingerprint(one) != fingerprint(spec("gateway", "--listen-fd", "7", "--insecure"))


def test_settings_of_the_environment_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(spec("decode"))
    monkeypatch.setenv("TERM_OF_TEST", "other")
    assert fingerprint(spec("decode")) == before
    monkeypatch.setenv("MOTET_WEIGHTS", "int8")
    assert fingerprint(spec("decode")) != before


def test_code_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from motet_cli.survival import record

    def digest() -> str:
        record._code.cache_clear()
        return fingerprint(spec("decode"))

    package = tmp_path / "motet_other"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    before = digest()
    assert digest() == before
    os.utime(package / "__init__.py", ns=(1, 1))
    after = digest()
    assert after != before
    (package / "replaced.py").symlink_to("removed.py")  # as a file that an upgrade removes just now
    assert digest() == after
