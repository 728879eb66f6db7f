"""Provide one example of each struct of the wire protocol, for docs/wire.md."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from motet_shared import messages as wire
from motet_shared.messages import PROTOCOL

CALLER, WORKER = "gateway-0badcafe", "decode-5eed0001"
MODEL = "pocket-chat"
SAMPLING = wire.Sampling(temperature=0.7, seed=7, max_tokens=64)
SOUND = wire.BlobRef(transport="tcp", address="10.0.0.5:4700", key="6f2d", nbytes=96044)
PICTURE = wire.BlobRef(transport="tcp", address="10.0.0.5:4700", key="91c0", nbytes=20480)
TENSOR = wire.BlobRef(
    transport="shm",
    address="motet-encoder-1",
    key="77ab",
    nbytes=1048576,
    dtype="float32",
    shape=(1, 256, 1024),
    fallback="10.0.0.7:4700",
    owner="encoder-5eed0002",
)
IMAGE = wire.Image(file=PICTURE, max_pixels=500_000)
EMBEDDING = wire.ImageEmbeddingRef(embeddings=TENSOR, name="b1946ac9", grid=(1, 16, 16))
STATES = wire.StateRef(states=msgspec.structs.replace(TENSOR, shape=(256, 1024)), start=2)
CHECKPOINT = wire.Checkpoint(step=10, data=b"\x08\x00")
CARD = wire.ModelCard(name=MODEL, context=4096, tools=True, vocab_size=32000, block_size=16)
ECHO = wire.Echo(count=2, text="hello")

OFFER = wire.Offer(role="decode", model="large", stage="loading", share=0.4, seconds=3.0)
PARTS: list[Struct] = [
    SOUND,
    wire.Usage(prompt_tokens=12, completion_tokens=3, cached_tokens=8),
    SAMPLING,
    wire.Grammar(kind="regex", text="[0-9]+", param="response_format"),
    IMAGE,
    EMBEDDING,
    STATES,
    wire.Resume(ids=[15496, 995], text_len=11),
    wire.TranscriptionResume(window=2, segment=5, skip=1, language="en"),
    wire.SpeechResume(text=18, samples=24000),
    wire.VoiceSample(SOUND, "Good morning."),
    CHECKPOINT,
    CARD,
    OFFER,
]
SMALL_ARRAYS: list[Struct] = [
    wire.TokenLogprob(15496, -0.5, [(15496, -0.5), (995, -1.25)]),
    wire.ToolCallDelta(0, "call_1", "weather", '{"city":'),
    wire.TextLogprob(b"Hi", -0.5, [(b"Hi", -0.5)]),
    wire.ScoredToken(15496, -0.5, 1, [(15496, -0.5)]),
    wire.PromptLogprob(b"Hi", -0.5, 1, [(15496, b"Hi", -0.5)]),
    wire.Adapter("watercolour", 0.75),
    wire.Control("canny", PICTURE, 0.8),
    wire.ImagePrompt("style", PICTURE, 0.6),
]
REQUESTS: list[wire.Request] = [
    wire.Chat(model=MODEL, messages=[{"role": "user", "content": "Hello"}], sampling=SAMPLING),
    wire.Complete(model=MODEL, prompt="Once upon", sampling=SAMPLING, stop=["\n"]),
    wire.Tokenize(prompt=wire.Complete(model=MODEL, prompt="Once upon", sampling=SAMPLING)),
    wire.Detokenize(model=MODEL, ids=[1, 15496]),
    wire.Generate(model=MODEL, prompt=[1, 15496], sampling=SAMPLING, tenant="acme"),
    wire.Prefill(model=MODEL, prompt=[1, 15496], kv_format="a41f", request_id="r-1"),
    wire.SwitchRole(role="prefill"),
    wire.ListBlocks(),
    wire.Encode(model="pocket-see", image=IMAGE),
    wire.Profile(model=MODEL, steps=5),
    wire.Detect(sample_rate=16000, idle_timeout_ms=5000),
    wire.PredictTurnEnd(text="I would like to"),
    wire.FindSpeech(audio=SOUND),
    wire.EmbedSpeakers(audio=SOUND, spans=[(0.0, 1.5)]),
    wire.Transcribe(model="pocket-asr", audio=SOUND, language="en", words=True),
    wire.Listen(model="pocket-asr", sample_rate=16000),
    wire.Speak(model="pocket-tts", text="Hello there.", voice="ada"),
    wire.SpeakStates(model="qwen2.5-omni", voice="Chelsie", seed=7),
    wire.Embed(model="pocket-embed", input=["a star", "a circle"]),
    wire.Rank(model="reranker", queries=["a star"], documents=["a large star", "a circle"]),
    wire.Draw(model="pocket-draw", prompt="a red circle", width=64, height=64, seed=7),
    wire.ListTargets(),
    ECHO,
]
ITEMS: list[Struct] = [
    wire.Tokens([15496]),
    wire.CountedTokens([15496], prompt_tokens=29),
    wire.StatedTokens([15496], states=STATES),
    wire.States(STATES, 2),
    wire.PromptScores(1, [wire.ScoredToken(15496, -0.5, 1)]),
    wire.PromptPiece(0, [1, 15496]),
    wire.Text("Hello", [15496], prompt_tokens=12, reasoning="A greeting."),
    wire.TargetText("Hello", [15496], target="second"),
    wire.TokenIds([1, 15496]),
    wire.Blob(SOUND),
    wire.Chunk(b"\x1f\x8b"),
    wire.TurnEnd(0.12),
    wire.SpeechEdge("start", 220, 520, 640),
    wire.SpeechSpans([(0.5, 2.25)], 3.0),
    wire.SpeakerEmbedding(b"\x00\x00\x80?", 0.5),
    wire.EncodedImage(EMBEDDING, [32001, 32001]),
    wire.CachedBlocks(4, [9223372036854775809]),
    wire.KvChunk(0, 16, [0, 1], 0, 16, TENSOR, True),
    wire.Vectors(b"\x00\x00\x80?", 1, 3),
    wire.Scores([0.98, 0.02], 24),
    wire.Recording(3.0, "en", "english"),
    wire.Segment(0, 0, 0.5, 2.25, " Hello.", words=[(" Hello.", 0.5, 2.25)]),
    wire.Partial("Hello", " wor"),
    wire.Audio(b"\x00\x00\x01\x00", [("Hello", 0, 400)]),
    wire.DenoisingProgress(10, 20, checkpoint=CHECKPOINT),
    wire.Picture(PICTURE, 64, 64, 20),
    wire.ScalingTarget("chat", "decode", 2, 1, 1, "queue", {"queue": 1.5}, 12.0),
]
FRAMES: list[Struct] = [
    wire.Accepted(7),
    wire.Item(7, 0, wire.Tokens([15496])),
    wire.Keepalive(7, 1),
    wire.FeedCredit(7, 96),
    wire.End(7, 1, "stop", wire.Usage(12, 1), {"decode.total": 0.25}),
    wire.Error(7, 1, "overloaded", "the queue is full", True),
]
ENVELOPES: list[Struct] = [
    wire.Frames(PROTOCOL, WORKER, [wire.Accepted(7), wire.Item(7, 0, wire.Tokens([15496]))]),
    wire.Credit(7, 128),
    wire.Cancel(7),
    wire.Controls(PROTOCOL, CALLER, [wire.Credit(7, 128)]),
    wire.Feed(7, 0, b"\x00\x00\x01\x00"),
    wire.Feeds(PROTOCOL, CALLER, [wire.Feed(7, 1, b"", True)]),
    wire.Pong(PROTOCOL, CALLER, "ready"),
    wire.CacheUpdate(PROTOCOL, WORKER, 4, [9223372036854775809], [17]),
]
EVENTS: list[Struct] = [
    wire.Open(v=PROTOCOL, caller=CALLER, stream=7, credit=64, body=ECHO, deadline_ms=30000),
    wire.Heartbeat(
        v=PROTOCOL,
        role="decode",
        instance=WORKER,
        state="ready",
        seq=41,
        models=[CARD],
        load={"active": 1.0, "queued": 0.0},
        host="node-1",
        pid=17,
    ),
    wire.Heartbeat(
        v=PROTOCOL,
        role="operator",
        instance="operator-5d1c2b3a",
        state="ready",
        seq=3,
        offers=[OFFER],
    ),
]
