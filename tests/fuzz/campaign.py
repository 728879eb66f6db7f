"""Fuzzed messages on every subject that a service listens to, round by round, and what was answered."""

from __future__ import annotations

import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgpack
from nats.aio.client import Client
from nats.aio.msg import Msg

from fuzz.mutations import Fuzzer
from fuzz.specimens import DEAD, Specimens
from fuzz.whole_stack import FUZZER, MODEL, WholeStack, png
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import BY_CODE, InternalError
from motet_shared.messages import PROTOCOL
from motet_shared.wire.subjects import role_of
from support.media.spoken import say, silence, wav

BURST = 100  # messages until the server is asked whether it has them all
_STRANGE = 0.1  # of the messages that belong on another subject
_HEADERS = ("traceparent", "tracestate", "baggage")
_LOOKS = "abcdef0123456789-:;,= é"


@dataclass
class Campaign:
    """`answered`: how often each kind of error came back. `untyped`: what came back and should not."""

    client: Client
    subjects: list[str]
    specimens: Specimens
    fuzzer: Fuzzer
    caller: str
    answered: Counter[str] = field(default_factory=Counter)
    untyped: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    _deck: list[str] = field(default_factory=list)

    async def run(self, count: int) -> None:
        """Say `count` messages, each on a subject by chance. The server has all of them at the end."""
        for number in range(count):
            await self._say()
            if number % BURST == 0:
                await self.client.flush()
        await self.client.flush()

    async def _say(self) -> None:
        random, pattern = self.fuzzer.random, self._next_pattern()
        subject = self._concrete(pattern)
        meant = (
            self._concrete(random.choice(self.subjects)) if random.random() < _STRANGE else subject
        )
        data = self.fuzzer.message(self.specimens.of(meant))
        reply = f"{self._inbox}.open.{random.randrange(1000)}" if random.random() < 0.8 else ""
        headers = {name: _text(random) for name in _HEADERS} if random.random() < 0.1 else None
        self.sent[pattern] += 1
        await self.client.publish(subject, data, reply=reply, headers=headers)

    def _next_pattern(self) -> str:
        """Each has its turn; those of the service API, which reads no bytes, more seldom than others."""
        if not self._deck:
            self._deck = [
                subject
                for subject in self.subjects
                for _ in range(1 if subject.startswith("$") else 3)
            ]
            self.fuzzer.random.shuffle(self._deck)
        return self._deck.pop()

    def _concrete(self, pattern: str) -> str:
        """A subject that the pattern matches; heartbeats and news come from known and from unknown processes."""
        random = self.fuzzer.random
        if pattern.startswith("motet.v2.ev."):
            role = role_of(random.choice(self.specimens.senders))
            known = [sender for sender in self.specimens.senders if role_of(sender) == role]
            instance = random.choice([*known, f"{role}-{random.randrange(40):04x}"])
            return f"motet.v2.ev.{role}.{instance}.{pattern.rpartition('.')[2]}"
        parts = [
            str(random.randrange(60)) if part in ("*", ">") else part for part in pattern.split(".")
        ]
        return ".".join(parts)

    # ------------------------------------------------------------------------------------------------- what comes back
    @property
    def _inbox(self) -> str:
        return f"motet.v2.inbox.{role_of(self.caller)}.{self.caller}"

    async def listen(self) -> None:
        await self.client.subscribe(f"{self._inbox}.>", cb=self._on_answer)
        await self.client.subscribe(
            f"motet.v2.{role_of(self.caller)}.i.{self.caller}.ctl", cb=self._on_probe
        )
        await self.client.flush()

    async def _on_answer(self, msg: Msg) -> None:
        if not msg.data or msg.data[:1] == b"{":  # nobody serves it; $SRV, which speaks JSON
            return
        message = msgpack.unpackb(msg.data, strict_map_key=False)
        if message[0] != "f":
            self.answered[str(message[0])] += 1
            return
        for frame in message[3]:
            if frame[0] != "!":
                self.answered[str(frame[0])] += 1
            elif frame[3] in BY_CODE and frame[3] != InternalError.code:
                self.answered[frame[3]] += 1
            elif frame[3] != InternalError.code and frame[3]:
                self.answered["forged"] += (
                    1  # by us, on the way from somebody else: it is told on as it came
                )
            else:
                self.untyped[f"{message[2]}: {frame[3]}: {str(frame[4])[:200]}"] += 1

    async def _on_probe(self, msg: Msg) -> None:
        if msg.reply and self.client.is_connected:  # probes still come while it leaves
            await msg.respond(msgpack.packb(["p", PROTOCOL, self.caller, "ready"]))


@asynccontextmanager
async def campaign(stack: WholeStack, seed: int) -> AsyncIterator[Campaign]:
    """A caller that lives until it is left: then all that it asked for is cancelled."""
    client, caller = Client(), f"gateway-{secrets.token_hex(4)}"
    await client.connect(
        stack.nats.url, user=FUZZER, password=stack.nats.passwords[FUZZER], pending_size=8 << 20
    )
    listening = await stack.subjects()
    try:
        async with BlobStore(caller, 16 << 20) as store:
            sound = store.put(
                wav(silence(100) + say("One two.") + silence(100)), readers=1 << 20, ttl=3600
            )
            image = store.put(png(), readers=1 << 20, ttl=3600)
            fuzzer = Fuzzer(seed)
            callers, senders = (
                [*[caller] * 12, DEAD, *listening],
                [*listening, "decode-0000dead", caller],
            )
            specimens = Specimens(callers, senders, MODEL, sound, image, fuzzer.random)
            subjects = sorted({subject for found in listening.values() for subject in found})
            made = Campaign(client, subjects, specimens, fuzzer, caller)
            await made.listen()
            yield made
    finally:
        await client.close()


def _text(source: random.Random) -> str:
    """Fit for a header, and maybe for nothing else."""
    return "".join(source.choice(_LOOKS) for _ in range(source.randrange(60)))
