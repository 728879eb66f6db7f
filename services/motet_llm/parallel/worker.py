"""Follow the leader of a group: run its commands on this rank's part of the model."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from motet_llm.adapters.bank import AdapterBank
from motet_llm.config import EngineConfig
from motet_shared.errors import ConfigError, MotetError

from . import commands as c
from .caches import rows_of
from .collectives import GroupFailed
from .degrees import Degrees
from .forks import belong_to
from .link import Link
from .membership import Membership
from .rank_runner import RankRunner

log = logging.getLogger(__name__)

Store = Callable[[str, int], dist.Store]


def file_store(path: str, ranks: int) -> dist.Store:
    """Return the store in which the processes of a group find each other."""
    return dist.FileStore(path, ranks)


class Follower:
    """Run commands in order, until the link ends or one fails."""

    def __init__(self, link: Link[c.Command], store: Store = file_store):
        self.link, self._store = link, store
        self.runner: RankRunner | None = None
        self._caches = ExitStack()  # those that are used instead of the runner's own

    def run(self) -> None:
        """Follow the leader until the link ends. Report and raise what a command raises."""
        self.link.send(c.Started())
        try:
            while True:
                self._do(self.link.receive())
        except EOFError:
            return
        except Exception as error:
            reason = error.message if isinstance(error, MotetError) else repr(error)
            self._report(
                c.Failed(
                    reason,
                    follows=isinstance(error, GroupFailed),
                    refused=isinstance(error, ConfigError),
                )
            )
            raise

    def _report(self, report: c.Report) -> None:
        try:
            self.link.send(report)
        except OSError:
            log.info("the leader of the group is gone")

    def _do(self, command: c.Command) -> None:
        if isinstance(command, c.Join):
            self.runner = self._join(command)
            return
        runner = self.runner
        assert runner is not None
        match command:
            case c.Forward(rows, replays):
                runner.replays = replays
                runner.forward([c.RankWork.of(row) for row in rows])
            case c.LogitsOf(rows):
                runner.logits_of(rows)
            case c.CopyBlocks(sources, targets):
                runner.kv.copy(sources, targets)
            case c.ScrubBlocks(blocks):
                runner.kv.scrub(blocks)
            case c.TakePage(blocks):
                runner.kv.take_page(blocks)
            case c.PickRows(layer, slots):
                self._pick(runner, layer, slots)
            case c.PutRows():
                _put(runner, command)
            case c.CopyStates(sources, targets):
                _states(runner).copy(sources, targets)
            case c.ScrubState(slot):
                _states(runner).scrub(slot)
            case c.Resize(blocks_per_group):
                runner.resize(blocks_per_group)
            case c.UseOtherCaches(num_sequences, length):
                self._caches.enter_context(runner.other_caches(num_sequences, length))
            case c.UseOwnCaches():
                self._caches.close()
            case _:
                self._adapt(_bank(runner), command)

    def _pick(self, runner: RankRunner, layer: int, slots: list[int]) -> None:
        found = runner.kv.pick(layer, torch.tensor(slots)) if runner.kv.holds(layer) else []
        rows = [row.contiguous().view(torch.uint8).numpy().tobytes() for row in found]
        self._report(c.Done(rows=rows))

    def _adapt(self, bank: AdapterBank, command: c.Command) -> None:
        match command:
            case c.LoadAdapter(name, slot):
                try:
                    bank.load(name, slot)
                    self._report(c.Done())
                except MotetError as error:
                    self._report(c.Done(error.message))
            case c.AddAdapter(name, path):
                if bank.add(name, bank.read(name, Path(path))):
                    self._forget_recordings()
            case c.RemoveAdapter(name):
                bank.remove(name)

    def _forget_recordings(self) -> None:
        """Forget recordings that read factors which have moved."""
        assert self.runner is not None
        self.runner.forget_recordings()

    def _join(self, join: c.Join) -> RankRunner:
        config = msgspec.json.decode(join.settings, type=EngineConfig)
        degrees = Degrees.of(config)
        store = self._store(join.store, degrees.ranks)
        meeting = config.collective_timeout
        memory = self.link.receive_descriptor() if join.shares else None
        try:
            member = Membership(store, join.rank, degrees, meeting, join.load_timeout, memory)
        finally:
            if memory is not None:
                os.close(memory)
        return RankRunner(config, member)


def _put(runner: RankRunner, command: c.PutRows) -> None:
    rows, slots_N = rows_of(runner.kv, command), torch.tensor(command.slots)
    if command.exact:
        runner.kv.put(command.layer, rows, slots_N)
    else:
        values = rows[1] if len(rows) > 1 else None
        runner.kv.store(command.layer, rows[0], values, slots_N)


def _states(runner: RankRunner) -> Any:
    assert runner.states is not None
    return runner.states


def _bank(runner: RankRunner) -> AdapterBank:
    assert runner.adapters is not None
    return runner.adapters


def run_rank(descriptor: int, leader: int) -> int:
    """Be a rank of the process `leader`, at the other end of a socket; return the exit status."""
    belong_to(leader)
    logging.basicConfig(level=logging.WARNING)
    link: Link[c.Command] = Link(descriptor, c.Command)
    try:
        Follower(link).run()
    except Exception:
        log.exception("this rank ends")
        return os.EX_SOFTWARE
    finally:
        sys.stderr.flush()
    return os.EX_OK
