"""A rolling upgrade from an older release: both side by side, no stream is lost, and what was stored is read.

The older release is that of MOTET_OLD_RELEASE (a tag or commit), else the last tag, else the last commit that changed
the notes of a release. It is upgraded as docs/operate.md says: a new checkout in its place, and `motet restart`.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import nats
import pytest

from chaos.streams import Outcome, Streams, request
from e2e import markov
from e2e.stack import START_SECONDS, MotetStack
from support.running.releases import OLD_RELEASE, Checkout, described, old_release

pytestmark = [pytest.mark.extended("upgrade"), pytest.mark.timeout(1500)]

MODEL, STREAMS, TOKENS = "markov", 6, 1200
REQUESTS = [request(number, MODEL, TOKENS) for number in range(STREAMS)]
WORKERS = {"decode": 2, "tokenizer": 1}
FINISH = 300.0  # seconds for streams on a machine that imports another release meanwhile
NOT_NEEDED = ("--asr", "none", "--tts", "none", "--vad", "0")


class Upgraded:
    """A stack of the older release, which is replaced by this one."""

    def __init__(self, stack: MotetStack, checkout: Checkout):
        self.stack, self.checkout = stack, checkout

    @property
    def old_is_ready_for_orders(self) -> bool:
        """Return False for a release whose `motet up` imports what orders need with the first of them.

        From the new files it cannot; so it is given an order while it has its own.
        """
        return "_import_for_orders" in self.checkout.old_source("cli/motet_cli/supervision/up.py")

    def streams(self) -> Streams:
        return Streams(self.stack.url, REQUESTS)

    async def answered(self) -> list[Outcome]:
        async with self.streams() as streams:
            return await finished(streams)

    def restart(self, *roles: str) -> str:
        argv = [sys.executable, "-m", "motet_cli", "restart", *roles, "--url", self.stack.url]
        done = subprocess.run(
            argv, env=self.stack.env, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    async def releases(self) -> Counter[str]:
        """Return the number of instances by role and release: "decode new"."""
        client = await nats.connect(
            self.stack.nats_url, user="operator", password=self.stack.passwords["operator"]
        )
        found: dict[str, str] = {}
        try:
            inbox = client.new_inbox()
            answers = await client.subscribe(inbox)
            await client.publish("$SRV.INFO", reply=inbox)
            while True:
                message = await answers.next_msg(timeout=1.0)
                answer = json.loads(message.data)
                role = answer["id"].partition("-")[0]
                found[answer["id"]] = f"{role} {answer['version'].partition('+')[2]}"
        except nats.errors.TimeoutError:
            pass
        finally:
            await client.close()
        return Counter(kind for kind in found.values() if kind.split()[0] in (*WORKERS, "gateway"))

    @asynccontextmanager
    async def http(self) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(
            base_url=self.stack.url, timeout=120, trust_env=False
        ) as client:
            yield client


@pytest.fixture(scope="module")
def upgraded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Upgraded]:
    commit = old_release()
    if not commit:
        pytest.skip(f"no older release: no history here, or {OLD_RELEASE} names no commit of it")
    print(f"\nthe older release is {described(commit)}")
    folder = tmp_path_factory.mktemp("upgrade")
    checkout = Checkout(folder, commit)
    model = markov.save(folder / MODEL)
    for name in ("r", "s"):
        (folder / name).mkdir(mode=0o700)
    env = {
        "PYTHONPATH": checkout.python_path,
        "PYTHONSAFEPATH": "1",  # not from the folder of this process either
        "XDG_RUNTIME_DIR": str(folder / "r"),
        "XDG_STATE_HOME": str(folder / "s"),
    }
    counts = [word for role, count in WORKERS.items() for word in (f"--{role}", str(count))]
    flags = ("--llm", str(model), *counts, *NOT_NEEDED, "--store", str(folder / "store"))
    with MotetStack(folder, *flags, env=env, start_seconds=2 * START_SECONDS) as stack:
        stack.wait_until_all_ready()
        yield Upgraded(stack, checkout)


async def finished(streams: Streams) -> list[Outcome]:
    """Wait for the end of all streams. A TimeoutError says how far each came."""
    try:
        return await streams.finish(FINISH)
    except TimeoutError as error:
        error.add_note(f"characters of each: {[len(one.text) for one in streams.outcomes]}")
        raise


def check(found: list[Outcome], undisturbed: list[Outcome], what: str) -> None:
    pause = max(one.longest_pause for one in found)
    print(f"{what}: longest pause {pause:.2f} s")
    for one, other in zip(found, undisturbed, strict=True):
        assert (one.finish, one.error, one.broken) == ("length", None, ""), what
        assert one.text == other.text, what


async def stored(http: httpx.AsyncClient) -> dict[str, Any]:
    """Store a response and a file; return what was said of each."""
    body = {"model": MODEL, "input": "a text that stays", "max_output_tokens": 16}
    response = await http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    file = await http.post(
        "/v1/files",
        data={"purpose": "user_data"},
        files={"file": ("kept.txt", b"kept over an upgrade")},
    )
    assert file.status_code == 200, file.text
    return {"response": response.json(), "file": file.json()}


async def check_stored(http: httpx.AsyncClient, kept: dict[str, Any]) -> None:
    """Read what another release stored, and go on from it."""
    response, file = kept["response"], kept["file"]
    found = await http.get(f"/v1/responses/{response['id']}")
    assert found.status_code == 200, found.text
    assert found.json()["output"] == response["output"]
    content = await http.get(f"/v1/files/{file['id']}/content")
    assert (content.status_code, content.content) == (200, b"kept over an upgrade")
    body = {
        "model": MODEL,
        "input": "and on",
        "max_output_tokens": 16,
        "previous_response_id": response["id"],
    }
    onward = await http.post("/v1/responses", json=body)
    assert onward.status_code == 200, onward.text
    assert onward.json()["usage"]["input_tokens"] > response["usage"]["total_tokens"]


async def test_a_rolling_upgrade_loses_no_stream_and_nothing_stored(upgraded: Upgraded) -> None:
    undisturbed = await upgraded.answered()
    assert all(one.finish == "length" for one in undisturbed)
    async with upgraded.http() as http:
        kept = await stored(http)
    assert await upgraded.releases() == {"decode old": 2, "tokenizer old": 1, "gateway old": 1}

    if not upgraded.old_is_ready_for_orders:
        await asyncio.to_thread(upgraded.restart, "tokenizer")
    upgraded.checkout.use("new")
    for role, after in (
        ("decode", {"decode new": 2, "tokenizer old": 1, "gateway old": 1}),
        ("tokenizer", {"decode new": 2, "tokenizer new": 1, "gateway old": 1}),
        ("gateway", {"decode new": 2, "tokenizer new": 1, "gateway new": 1}),
    ):
        async with upgraded.streams() as streams:
            await streams.reached(20)
            rolling = asyncio.create_task(asyncio.to_thread(upgraded.restart, role))
            mixed: set[str] = set()
            while not rolling.done():
                mixed |= (await upgraded.releases()).keys()
            print(rolling.result(), end="")
            check(await finished(streams), undisturbed, f"{role}, while it is replaced")
        assert {f"{role} old", f"{role} new"} <= mixed, "both were there at a time"
        assert await upgraded.releases() == after
        check(await upgraded.answered(), undisturbed, f"{role}, replaced")
    async with upgraded.http() as http:
        await check_stored(http, kept)
        kept = await stored(http)

    # And back: what the newer release stored is read by the older one.
    upgraded.checkout.use("old")
    await asyncio.to_thread(upgraded.restart, "gateway")
    async with upgraded.http() as http:
        await check_stored(http, kept)
    check(await upgraded.answered(), undisturbed, "back at the older gateway")
