"""Any bytes on any subject: nobody dies, only typed errors are answered, and all is as before.

`MOTET_FUZZ_FRAMES` says how many (a million is the full form), `MOTET_FUZZ_SEED` which.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from pathlib import Path

import psutil
import pytest

from fuzz.campaign import campaign
from fuzz.whole_stack import ROLES, WholeStack, whole_stack
from motet_shared.wire.discovery import EXPIRES_AFTER, HEARTBEAT_EVERY

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)  # a million take their time: --log-cli-level=INFO shows how far it is

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.timeout(7200)]

FRAMES = int(os.environ.get("MOTET_FUZZ_FRAMES", "8000"))
SEED = int(os.environ.get("MOTET_FUZZ_SEED", "1"))
ROUND = 2500  # frames from one caller
GROWTH = (
    96 << 20
)  # bytes of this process, services and their models included, after the first rounds


async def test_fuzzed_frames_on_every_subject_change_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    async with whole_stack(tmp_path) as stack:
        before = await stack.answers()
        listened = {
            subject for subjects in (await stack.subjects()).values() for subject in subjects
        }
        spoken: set[str] = set()
        sizes = []
        for number in range(0, FRAMES, ROUND):
            spoken |= await one_round(stack, SEED + number, min(ROUND, FRAMES - number), caplog)
            gc.collect()
            sizes.append(psutil.Process().memory_info().rss)
            log.info("%d frames, %d MB", number + ROUND, sizes[-1] >> 20)
        # A forged heartbeat describes an instance until its own next one, or one that does not exist
        # until it expires.
        await asyncio.sleep(EXPIRES_AFTER + 2 * HEARTBEAT_EVERY)
        assert await stack.answers() == before
        await stack.idle()
        assert spoken >= listened, "every subject had its share"
        assert {
            subject.split(".")[2] for subject in spoken if subject.startswith("motet.v2.")
        } >= set(ROLES)
        settled = sizes[len(sizes) // 3 :]
        assert settled[-1] - settled[0] < GROWTH, f"memory: {[size >> 20 for size in sizes]} MB"


def is_fault(record: logging.LogRecord) -> bool:
    """Return True for an error, unless it is a connection to NATS that is lost and made again.

    All services are tasks and threads of one process here: one that records a profile holds up the others, and the
    server closes connections that do not answer.
    """
    lost = record.exc_info is not None and isinstance(record.exc_info[1], OSError | TimeoutError)
    return record.levelno >= logging.ERROR and not (record.name.startswith("nats.") and lost)


async def one_round(
    stack: WholeStack, seed: int, count: int, caplog: pytest.LogCaptureFixture
) -> set[str]:
    """Frames of one caller, which then leaves; the subjects that it spoke on."""
    where = f"MOTET_FUZZ_SEED={seed} MOTET_FUZZ_FRAMES={count}"
    async with campaign(stack, seed) as attack:
        await attack.run(count)
        await stack.gateway.bus.control.flush()
    await stack.idle()
    assert not attack.untyped, f"{where}: {attack.untyped.most_common(5)}"
    assert attack.answered["malformed_message"], f"{where}: nothing was refused"
    assert not stack.troubles(), f"{where}: {stack.troubles()}"
    errors = [record for record in caplog.records if is_fault(record)]
    assert not errors, (
        f"{where}: {[record.getMessage() for record in errors[:3]]}, {errors[0].exc_text}"
    )
    return set(attack.sent)
