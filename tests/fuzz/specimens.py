"""Valid messages of every kind that goes over the wire: what a fuzzer damages."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

import msgpack

from motet_shared import messages as wire
from motet_shared.messages import (
    PROTOCOL,
    BlobRef,
    Body,
    Feed,
    Frames,
    Heartbeat,
    Item,
    ModelCard,
    Open,
    Sampling,
    Usage,
)

DEAD = "gateway-0000dead"


@dataclass
class Specimens:
    """`callers`: instance ids that opens come from; `senders`: those that frames come from; files to refer to."""

    callers: list[str]
    senders: list[str]
    model: str
    sound: BlobRef
    picture: BlobRef
    random: random.Random

    def __post_init__(self) -> None:
        self._streams = itertools.count(1)
        self._requests: dict[str, Any] = {
            str(body.__struct_config__.tag): body for body in self._valid_requests()
        }
        self._bodies = self._valid_bodies()

    def missing(self) -> set[str]:
        """Messages of which there is no specimen here."""
        asked = set(get_args(get_type_hints(Open)["body"])) - set(
            map(type, self._requests.values())
        )
        said = set(get_args(Body)) - set(map(type, self._bodies))
        return {cls.__name__ for cls in asked | said}

    def of(self, subject: str) -> Any:
        """What belongs on a subject, as plain values."""
        return _plain(self._maker(subject)(subject))

    def _maker(self, subject: str) -> Callable[[str], Any]:
        """By the last part of the subject, as `subjects` makes them."""
        parts = subject.split(".")
        if parts[0] == "$SRV":
            return lambda _: {}
        if len(parts) == 4:  # motet.v2.<role>.<operation>
            return self._open
        if parts[2] == "inbox":
            return {"frames": self._frames, "open": self._refusal}.get(parts[5], self._pong)
        makers = {"ctl": self._controls, "feed": self._feeds, "open": self._open_at}
        makers |= {"heartbeat": self._heartbeat, "cache": self._news}
        return makers[parts[-1]]

    # --------------------------------------------------------------------------------------------- to those that work
    def _open(self, subject: str) -> Open:
        return self._opening(subject.rpartition(".")[2])

    def _open_at(self, subject: str) -> Open:
        return self._opening(self.random.choice(list(self._requests)))

    def _opening(self, name: str) -> Open:
        return Open(
            v=PROTOCOL,
            caller=self.random.choice(self.callers),
            stream=next(self._streams) if self.random.random() < 0.9 else self._old_stream(),
            credit=self.random.choice((1, 64, 1000)),
            body=self._requests[name],
            deadline_ms=self.random.choice((None, 1, 500, 5000)),
            session=self.random.choice(("", "", "sess_1")),
            epoch=self.random.randrange(4),
        )

    def _controls(self, _: str) -> wire.Controls:
        parts: list[Any] = [wire.Credit(self._old_stream(), 1000), wire.Cancel(self._old_stream())]
        return wire.Controls(
            PROTOCOL, self.random.choice(self.callers), parts[: self.random.randrange(3)]
        )

    def _feeds(self, _: str) -> wire.Feeds:
        stream = self._old_stream()
        feeds = [Feed(stream, seq, bytes(960)) for seq in range(4)] + [Feed(stream, 4, b"", True)]
        return wire.Feeds(PROTOCOL, self.random.choice(self.callers), self._shuffled(feeds))

    # ---------------------------------------------------------------------------------------------- to those that ask
    def _frames(self, _: str) -> Frames:
        stream = self._old_stream(60)
        bodies = self.random.choices(self._bodies, k=3)
        items = [Item(stream, seq, body) for seq, body in enumerate(bodies)]
        end = wire.End(stream, 3, "stop", Usage(1, 2, 3), {"decode.prefill": 0.1})
        around: list[Any] = [
            wire.Accepted(stream),
            *items,
            wire.Keepalive(stream, 3),
            wire.FeedCredit(stream, 64),
            end,
        ]
        return Frames(PROTOCOL, self.random.choice(self.senders), self._shuffled(around))

    def _refusal(self, _: str) -> Frames:
        error = wire.Error(0, 0, "malformed_message", "open cannot be read", False, "body")
        return Frames(PROTOCOL, self.random.choice(self.senders), [error])

    def _pong(self, _: str) -> wire.Pong:
        return wire.Pong(PROTOCOL, self.random.choice(self.senders), "ready")

    # -------------------------------------------------------------------------------------------------------- to all
    def _heartbeat(self, subject: str) -> Heartbeat:
        """Of whom the subject names: others are not believed."""
        _, _, _, role, instance, _ = subject.split(".")
        card = ModelCard(
            name=self.model, context=256, vocab_size=300, block_size=8, voices=["alto"], live=True
        )
        state = self.random.choice(("starting", "warming", "ready", "draining", "stopped"))
        load = {"active": 1.0, "queued": 0.0, "kv_free": 0.5, "cache_updates": 3.0}
        return Heartbeat(
            v=PROTOCOL, role=role, instance=instance, state=state, seq=5, models=[card], load=load
        )

    def _news(self, subject: str) -> wire.CacheUpdate:
        number = self.random.randrange(6)
        return wire.CacheUpdate(PROTOCOL, subject.split(".")[4], number, [1, 2, 2**63], [3])

    # ---------------------------------------------------------------------------------------------------------- parts
    def _old_stream(self, most: int = 10**9) -> int:
        """Of those that were opened, mostly of late."""
        newest = min(next(self._streams), most)
        return max(1, newest - self.random.randrange(30))

    def _shuffled(self, parts: list[Any]) -> list[Any]:
        """As it is, or with a part that is missing, comes twice, or comes late."""
        if self.random.random() < 0.5:
            return parts
        part = parts.pop(self.random.randrange(len(parts)))
        for _ in range(self.random.choice((0, 1, 2))):
            parts.insert(self.random.randrange(len(parts) + 1), part)
        return parts

    def _valid_requests(self) -> list[wire.Request]:
        model, sampling = self.model, Sampling(temperature=0.5, seed=3, max_tokens=3)
        messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]
        image = wire.Image(file=self.picture, max_pixels=1000)
        resume = wire.Resume([40, 41], 2)
        raw = wire.Complete(model=model, prompt="abc", sampling=sampling)
        return [
            wire.Chat(
                model=model,
                messages=messages,
                images=[image],
                sampling=sampling,
                max_tokens=3,
                priority=1,
            ),
            wire.Complete(
                model=model,
                prompt="abc",
                sampling=sampling,
                max_tokens=3,
                stop=["zz"],
                resume=resume,
            ),
            wire.Tokenize(prompt=raw, pieces=True),
            wire.Detokenize(model=model, ids=[40, 41, 42]),
            wire.Generate(
                model=model, prompt=[40, 41, 42], sampling=sampling, output=[43], tenant="a\x00b"
            ),
            wire.ListBlocks(),
            wire.Prefill(model=model, prompt=[40, 41, 42], kv_format="none", start=1),
            wire.SwitchRole(role="decode"),
            wire.ListTargets(),
            wire.Encode(model=model, image=image),
            wire.Encode(
                model=model,
                image=wire.Image(file=self.picture, merged=[self.picture, self.picture]),
            ),
            wire.Profile(model=model, steps=1, seconds=0.05),
            wire.Detect(idle_timeout_ms=5000, pause_ms=100),
            wire.PredictTurnEnd(text="and then"),
            wire.FindSpeech(audio=self.sound),
            wire.EmbedSpeakers(audio=self.sound, spans=[(0.0, 0.5)]),
            wire.Transcribe(
                model=model, audio=self.sound, language="en", speech=[(0.0, 0.5)], words=True
            ),
            wire.Listen(model=model, language="en"),
            wire.Speak(model=model, text="Hello you.", seed=1, resume=wire.SpeechResume(0, 0, 9)),
            wire.SpeakStates(model=model, voice="a", seed=1, skip=2),
            wire.Embed(model=model, input=["a", "b"], dimensions=4),
            wire.Rank(model=model, queries=["a"], documents=["b", "c"], max_document=4),
            wire.Draw(
                model=model, prompt="a red circle", width=32, height=32, steps=2, seed=1, previews=1
            ),
            wire.Echo(),
        ]

    def _valid_bodies(self) -> list[Any]:
        """One of each kind of item."""
        embedding = wire.ImageEmbeddingRef(embeddings=self.picture, name="n", grid=(1, 2, 2))
        states = wire.StateRef(states=self.picture, start=2)
        return [
            wire.Tokens([40], [wire.TokenLogprob(40, -0.5, [(40, -0.5)])]),
            wire.CountedTokens([40], prompt_tokens=3),
            wire.StatedTokens([40], states=states),
            wire.States(states, 3),
            wire.Text(
                "a",
                [40],
                [wire.ToolCallDelta(0, "call_0", "draw", "{}")],
                [wire.TextLogprob(b"a", -0.5)],
            ),
            wire.TargetText("a", [40], target="t"),
            wire.TokenIds([40], ["a"]),
            wire.PromptScores(1, [wire.ScoredToken(40, -0.5, 1, [(40, -0.5)])]),
            wire.PromptPiece(0, [40], [wire.PromptLogprob(b"a", -0.5, 1, [(40, b"a", -0.5)])]),
            wire.Blob(self.sound),
            wire.Chunk(b"abc"),
            wire.SpeechEdge("start", 100, 120, 200),
            wire.TurnEnd(0.5),
            wire.SpeechSpans([(0.1, 0.5)], 1.0),
            wire.SpeakerEmbedding(bytes(64), 0.5),
            wire.EncodedImage(embedding, [1, 2, 3]),
            wire.CachedBlocks(3, [1, 2]),
            wire.KvChunk(0, 8, [0, 1], 0, 8, self.sound, True),
            wire.ScalingTarget("g", "decode", 2, 1, 0, "load", {"tokens": 1.5}, 3.0),
            wire.Vectors(bytes(16), 1, 3),
            wire.Scores([0.5, -1.0], 7),
            wire.Recording(1.0, "en", "english"),
            wire.Segment(0, 0, 0.0, 1.0, " a", [1], [("a", 0.0, 0.5)]),
            wire.Partial("a", "b"),
            wire.Audio(bytes(96), [("a", 0, 5)], 0, 3, Usage(1, 2)),
            wire.DenoisingProgress(1, 2, b"png", wire.Checkpoint(1, b"data")),
            wire.Picture(self.picture, 32, 32, 2),
            wire.Picture(self.picture, 32, 32, 2, 9, 8.0),
        ]


def _plain(message: Any) -> Any:
    return msgpack.unpackb(wire.encode(message), strict_map_key=False)
