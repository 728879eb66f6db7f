"""Decide what becomes of the processes that an earlier supervisor has left: keep, replace or end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

from motet_cli.supervision.child import ChildSpec
from motet_cli.survival.record import ProcessRecord, fingerprint

Fingerprint = Callable[[ChildSpec], str]


@dataclass
class Takeover:
    """Hold the decision.

    keep: processes with their specs now. replace: those that serve until a process of the new spec
    is ready. end: those that are wanted no more. start: specs without a process.
    """

    keep: list[tuple[ProcessRecord, ChildSpec]] = field(default_factory=list)
    replace: list[tuple[ProcessRecord, ChildSpec]] = field(default_factory=list)
    end: list[ProcessRecord] = field(default_factory=list)
    start: list[ChildSpec] = field(default_factory=list)


def decide(
    found: Iterable[ProcessRecord],
    wanted: Sequence[ChildSpec],
    fixed: Collection[str],
    digest: Fingerprint = fingerprint,
) -> Takeover:
    """Return what becomes of the processes `found`, where those of `wanted` are to run.

    A process is kept if its arguments, settings and code are those of the wanted one of its name, and
    so are instances that were added to it by `motet scale`. fixed: roles that are kept in any case.
    """
    taken = Takeover()
    named: dict[str, ProcessRecord] = {}
    for one in found:
        if one.leaving or one.spec.name in named:
            taken.end.append(one)  # of a restart that the earlier supervisor has not completed
        else:
            named[one.spec.name] = one
    unchanged = {}
    for spec in wanted:
        old = named.pop(spec.name, None)
        if old is None:
            taken.start.append(spec)
        elif spec.role in fixed or _same(old, spec, digest(spec)):
            taken.keep.append((old, spec))
            unchanged[spec.role, spec.model, old.fingerprint] = spec
        else:
            taken.replace.append((old, spec))
    for one in named.values():
        sibling = unchanged.get((one.spec.role, one.spec.model, one.fingerprint))
        if sibling is None:
            taken.end.append(one)
        else:
            taken.keep.append((one, _instance(sibling, one.spec)))
    return taken


def _same(one: ProcessRecord, spec: ChildSpec, wanted: str) -> bool:
    return one.fingerprint == wanted and one.spec.gpus == spec.gpus


def _instance(sibling: ChildSpec, spec: ChildSpec) -> ChildSpec:
    """Return the spec of another instance, in the place where it is."""
    return replace(sibling, name=spec.name, env=spec.env, gpus=spec.gpus)
