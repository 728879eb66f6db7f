"""Every struct on the wire: the protocol on one page.

A message is MessagePack. What opens work is a *map* (fields may be added, unknown ones are ignored); what flows in
bulk is an *array* with its tag first. One NATS message carries many frames: an actor sends one `Frames` per step and
destination process.

    caller  → worker   Open            on motet.v1.<role>.<op>  or  motet.v1.<role>.i.<instance>.open
    worker  → caller   Frames[…]       on motet.v1.inbox.<role>.<instance>.frames
    caller  → worker   Controls[…]     on motet.v1.<role>.i.<instance>.ctl
    caller  → worker   Feeds[…]        on motet.v1.<role>.i.<instance>.feed
    anyone  → anyone   Heartbeat       on motet.v1.ev.<role>.<instance>.heartbeat

A stream is named by its caller's instance id and a number that the caller never uses again. `seq` counts the items of
a stream from 0; every other frame carries the number of items sent so far, so that a lost tail is noticed. What a
caller feeds into a stream is counted and granted in the same way, in the other direction.
Deadlines are remaining milliseconds, never wall-clock times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct

PROTOCOL = 1
FEED_WINDOW = 64  # feeds that may be sent before the first Want, and that a worker keeps for a slow reader
FEED_SIZE = 32 * 1024  # most bytes in one feed


# -------------------------------------------------------------------------------------------------------- small parts
class BlobRef(Struct, frozen=True, omit_defaults=True):
    """Bulk bytes that travel out of band. `address` is the transport's (segment name, or host:port)."""

    transport: Literal["shm", "tcp"]
    address: str
    key: str
    nbytes: int
    dtype: str = "uint8"
    shape: tuple[int, ...] = ()
    digest: str = ""  # BLAKE2b-128 of the bytes, hex; empty: not computed
    fallback: str = ""  # host:port of the owner's TCP server, used when attaching fails
    owner: str = ""  # instance id that holds the bytes


class Usage(Struct, omit_defaults=True, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # of prompt_tokens, served from a prefix cache
    image_tokens: int = 0  # of prompt_tokens, that stand for images
    reasoning_tokens: int = 0
    accepted_tokens: int = 0  # of completion_tokens, that were guessed ahead
    rejected_tokens: int = 0  # that were guessed, and are not among them


class Sampling(Struct, omit_defaults=True, kw_only=True):
    """How to draw the next token. Noise is keyed by (seed, position): the same seed goes on after a move."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output, as in transformers
    logit_bias: dict[int, float] = {}
    seed: int = 0
    logprobs: int = -1  # -1: none; 0: of the chosen token; n: and of the n most likely
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False


class Grammar(Struct, omit_defaults=True, kw_only=True):
    """What a reply must be a sentence of: its tokens are held to it, and its end ends the reply."""

    kind: Literal["json_schema", "regex", "choice", "grammar"]
    text: str  # the schema as JSON, the expression, the choices as a JSON list, or Lark's or llama.cpp's syntax
    param: str = ""  # where it stands in the client's request, which errors name


class TokenLogprob(Struct, array_like=True, gc=False):
    id: int
    logprob: float
    top: list[tuple[int, float]] = []  # most likely first


class ToolCallDelta(Struct, array_like=True, omit_defaults=True, gc=False):
    """A piece of a tool call. The first of an index carries id and name; `arguments` pieces concatenate to JSON."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class TextLogprob(Struct, array_like=True, gc=False):
    """Log-probability of one emitted token, with the bytes it stands for."""

    token: bytes
    logprob: float
    top: list[tuple[bytes, float]] = []


class Image(Struct, omit_defaults=True, kw_only=True):
    """A picture in a chat: a file in any format, and how much of it the model is to see; or a video."""

    file: BlobRef
    is_video: bool = False
    max_pixels: int = 0  # it is scaled down to about so many; 0: as many as the model takes
    param: str = ""  # where it stands in the client's request, which errors name


class Sight(Struct, omit_defaults=True, kw_only=True):
    """What a model sees of a picture: an embedding for each of its placeholders in the prompt."""

    embeddings: BlobRef  # float32 [layers, tokens, hidden]: the first layer's are embeddings, others are added deeper
    name: str  # of the content: what bears one name looks the same
    grid: tuple[int, ...] = ()  # (frames, rows, columns) of its tokens, where the model's positions have as many axes
    interval: float = 1.0  # from one of these frames to the next, in positions


class Resume(Struct, omit_defaults=True):
    """What a client already has of a broken stream. Replaying `ids` restores all text state; `text_len` checks it."""

    ids: list[int]
    text_len: int  # characters of content and of tool-call arguments together


# ----------------------------------------------------------------------------------------------------------- requests
class Request(Struct, kw_only=True, omit_defaults=True):
    """Base of what an Open asks for. The subclass tag is also the operation's name in the subject."""


class Chat(Request, tag="chat"):
    """gateway → tokenizer: messages in OpenAI's shape, text (and tool calls) back as `Text` items.

    A content part {"type": "image"} stands for the next one of `images`.
    """

    model: str
    messages: list[dict[str, Any]]
    sampling: Sampling
    images: list[Image] = []
    tools: list[dict[str, Any]] = []
    tool_choice: str = "auto"  # "auto" | "none" | "required"
    tool: str = ""  # the one that must be called, if it is required
    parallel_tools: bool = True  # more than one call in a reply
    grammar: Grammar | None = None  # of a reply that calls no tool
    stop: list[str] = []
    max_tokens: int | None = None  # None: as many as the context holds
    resume: Resume | None = None
    request_id: str = ""
    priority: int = 0
    tenant: str = ""
    max_context: int = 0  # most tokens of prompt and reply; 0: as many as the model takes


class Complete(Request, tag="complete"):
    """gateway → tokenizer: a raw prompt (text or token ids), `Text` items back."""

    model: str
    prompt: str | list[int]
    sampling: Sampling
    grammar: Grammar | None = None
    echo: bool = False
    stop: list[str] = []
    max_tokens: int | None = 16
    resume: Resume | None = None
    request_id: str = ""
    priority: int = 0
    tenant: str = ""
    max_context: int = 0  # most tokens of prompt and reply; 0: as many as the model takes


TIERS = {"flex": -1, "default": 0, "priority": 1}  # the priorities that clients may ask for


def tier_of(priority: int) -> str:
    """The highest tier that a priority reaches."""
    return max((name for name in TIERS if TIERS[name] <= priority), key=TIERS.__getitem__, default="flex")


class Generate(Request, tag="generate"):
    """tokenizer → decode: token ids in, `Tokens` items back. `output` holds tokens that were emitted before a move.

    The placeholders in the prompt belong to `sights`, in order.
    """

    model: str
    prompt: list[int]
    sampling: Sampling
    output: list[int] = []
    grammar: Grammar | None = None  # `output` is its beginning
    sights: list[Sight] = []
    request_id: str = ""
    priority: int = 0  # higher ones go first
    tenant: str = ""  # whose share of the engine it uses; before a NUL those who share one among themselves


class Prefill(Request, tag="prefill"):
    """decode → prefill: have a prompt computed; `KvPiece` items come back while it is.

    Tokens before `start` the caller has. The blobs are kept until it ends its input: then it has read them all.
    """

    model: str
    prompt: list[int]
    kv: str  # the caller's `ModelCard.kv`
    start: int = 0
    request_id: str = ""
    priority: int = 0
    tenant: str = ""


class Become(Request, tag="become"):
    """operator → decode, prefill: go on in the other of these roles, once all that runs there is complete."""

    role: str


class Cached(Request, tag="cached"):
    """tokenizer → decode: what the prefix cache holds; `Held` items come back."""


class Encode(Request, tag="encode"):
    """anyone → vision: a picture; one `Seen` comes back."""

    model: str
    image: Image
    request_id: str = ""


class Profile(Request, tag="profile"):
    """operator → decode: record the engine's next steps; a gzipped Chrome trace (JSON) comes back as `Chunk` items.

    It ends after `steps` steps or `seconds` seconds, whichever comes first; steps=0: after `seconds`.
    """

    model: str
    steps: int = 20
    seconds: float = 60.0
    shapes: bool = False  # of each operator's inputs
    stacks: bool = False  # of Python, per operator: slows the steps down several times
    memory: bool = False  # allocated and freed, per operator


class Detect(Request, tag="detect"):
    """anyone → vad: PCM goes in as input of the stream, `SpeechEdge` items come back. The fields are `server_vad`'s."""

    model: str = ""  # empty: the one that is served
    sample_rate: int = 24000
    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    idle_timeout_ms: int | None = None
    pause_ms: int | None = None  # silence within a turn that is told, and how far the turn was heard


class Judge(Request, tag="judge"):
    """anyone → vad: has the speaker of these words finished? One `Verdict` comes back."""

    text: str  # the transcript of the turn so far
    model: str = ""  # empty: the one that is served


class Survey(Request, tag="survey"):
    """anyone → vad: a sound file in any format; one `Spoken` comes back. `Detect` says what the other fields mean."""

    audio: BlobRef
    model: str = ""  # empty: the one that is served
    threshold: float = 0.5
    prefix_padding_ms: int = 0
    silence_duration_ms: int = 100
    request_id: str = ""


class Voices(Request, tag="voices"):
    """anyone → speakers: a sound file in any format and stretches of it; a `Voice` of each comes back, in order."""

    audio: BlobRef
    spans: list[tuple[float, float]] = []  # seconds, by their beginnings; none: the file as one stretch
    model: str = ""  # empty: the one that is served
    request_id: str = ""


class HearingResume(Struct, omit_defaults=True):
    """What a client already has of a recording: the first window that it has not all of, and how it goes on there."""

    window: int
    segment: int  # id of that window's first segment
    skip: int  # segments of that window that the client has
    language: str = ""  # that was found


class Transcribe(Request, tag="transcribe"):
    """anyone → asr: a file in any format; a `Recording`, then `Segment` items as each becomes final."""

    model: str
    audio: BlobRef
    language: str = ""  # code or name; empty: found out
    task: Literal["transcribe", "translate"] = "transcribe"  # translate: into English
    prompt: str = ""  # what was said before, and how it is written
    temperature: float = 0.0  # 0: greedy, and higher ones where that goes wrong
    words: bool = False
    seed: int = 0
    speech: list[tuple[float, float]] | None = None  # seconds in which somebody speaks; None: told by the level
    resume: HearingResume | None = None
    request_id: str = ""


class Listen(Request, tag="listen"):
    """anyone → asr: PCM goes in as input of the stream, `Partial` items come back, and one `Segment` at its end."""

    model: str
    sample_rate: int = 24000
    language: str = ""
    prompt: str = ""
    words: bool = False
    request_id: str = ""


class SpeechResume(Struct, omit_defaults=True):
    """What a client already has of broken speech: where it is in the text, and how many samples."""

    text: int  # characters that are wholly spoken, to the end of a sentence: `Audio.text`
    samples: int  # of those characters
    skip: int = 0  # of the sentence after them


class Speak(Request, tag="speak"):
    """anyone → tts: text in, `Audio` items back. Noise is keyed by (seed, sentence), so it goes on after a move."""

    model: str
    text: str
    voice: str = ""  # empty: the model's first
    speed: float = 1.0  # 0.25 to 4, at the same pitch
    seed: int = 0
    sentence: int = 0  # number of the first sentence; above 0: sentences before it are spoken elsewhere
    resume: SpeechResume | None = None
    request_id: str = ""


class Embed(Request, tag="embed"):
    """anyone → embedding: texts, or token ids of texts; `Vectors` of them come back, in order."""

    model: str
    input: list[str | list[int]]  # all of one kind
    prompt: str = ""  # name of the prompt that goes before each text; empty: the model's default, if it has one
    dimensions: int = 0  # the first numbers of each vector, of unit length; 0: all
    first: int = 0  # number of the first text, for errors; above 0: texts before it are embedded elsewhere
    request_id: str = ""


class Checkpoint(Struct, omit_defaults=True):
    """A picture that is half done, as safetensors: inline where it is small. Any instance of its model goes on."""

    step: int  # steps that are done
    data: bytes = b""
    ref: BlobRef | None = None


class Adapter(Struct, array_like=True, gc=False):
    """A LoRA adapter of a diffusion model, by the name that the server gave it."""

    name: str
    scale: float = 1.0


class Draw(Request, tag="draw"):
    """anyone → diffusion: a prompt in, `Stroke` items while the picture forms, one `Picture` at the end.

    The noise depends on `seed` alone. Zero (None for the scales) stands for the model's own default. With `image` that
    picture is changed, with `mask` too (a picture of the same size) only where the mask is white.
    """

    model: str
    prompt: str
    negative_prompt: str = ""
    width: int = 0  # pixels
    height: int = 0
    steps: int = 0
    guidance_scale: float | None = None
    seed: int = 0
    image: BlobRef | None = None
    mask: BlobRef | None = None
    strength: float | None = None  # how far from `image`, 0 to 1
    previews: int = 0  # pictures of the estimate, evenly spread over the steps
    checkpoint_every: int = 0  # steps; 0: no checkpoints
    loras: list[Adapter] = []
    format: Literal["png", "jpeg", "webp"] = "png"
    quality: int = 90  # of jpeg and webp
    resume: Checkpoint | None = None
    request_id: str = ""


class Targets(Request, tag="targets"):
    """operator → planner: how many instances it wants; a `Wanted` per group comes back."""


class Echo(Request, tag="echo"):
    """To any actor that serves it (tests, the doctor): `count` items come back, `delay_ms` apart."""

    count: int = 1
    delay_ms: float = 0.0
    text: str = ""
    fail_at: int = -1  # raise before this item; -1: never


# ---------------------------------------------------------------------------------------------------- bodies of items
class Tokens(Struct, array_like=True, omit_defaults=True, gc=False, tag="t"):
    """decode → tokenizer: the tokens of one engine step (one, or several under speculation)."""

    ids: list[int]
    logprobs: list[TokenLogprob] | None = None


class Text(Struct, array_like=True, omit_defaults=True, gc=False, tag="x"):
    """tokenizer → gateway: text that is safe to show, and the ids consumed so far that it came from.

    `ids` may run ahead of `text`: half a character, a possible stop string or tag is held back.
    """

    text: str
    ids: list[int]
    tools: list[ToolCallDelta] | None = None
    logprobs: list[TextLogprob] | None = None


class Blob(Struct, array_like=True, tag="r"):
    ref: BlobRef


class Chunk(Struct, array_like=True, gc=False, tag="d"):
    """The next bytes of a file that is sent in order. Small enough for any `max_payload`."""

    data: bytes


class Verdict(Struct, array_like=True, gc=False, tag="v"):
    """vad: the probability that nothing more follows a text."""

    finished: float


class SpeechEdge(Struct, array_like=True, gc=False, tag="s"):
    """vad: speech starts or stops, or nobody spoke for the idle timeout. All times are ms of audio since the start.

    With `pause_ms` it also pauses and resumes within a turn, and `heard` only says how far the turn was heard, and how
    far (`speech_ms`) somebody has spoken.
    """

    kind: Literal["start", "stop", "idle", "pause", "resume", "heard"]
    ms: int  # as the realtime API tells it: with the prefix padding, with the silence that was waited for
    speech_ms: int  # where the speech itself starts or ends; for "idle": where the silence began
    heard_ms: int  # how much was heard when it was noticed


class Spoken(Struct, array_like=True, gc=False, tag="o"):
    """vad: where somebody speaks in a recording, in order and apart."""

    spans: list[tuple[float, float]]  # seconds
    duration: float  # of the recording, seconds


class Voice(Struct, array_like=True, gc=False, tag="n"):
    """speakers: how somebody sounds in a stretch of a recording, to be compared by the cosine."""

    vector: bytes  # float32, little-endian, of unit length
    alike: float  # the cosine from which two such vectors are rather one person's than two's


class Seen(Struct, array_like=True, tag="l"):
    """vision: a picture as the model sees it, and the token ids that stand for it in a prompt."""

    sight: Sight
    ids: list[int]  # placeholders, and the marks between them


class Held(Struct, array_like=True, gc=False, tag="y"):
    """decode: some of the blocks that its prefix cache holds (`prefixes`), as of the news before `number`."""

    number: int
    blocks: list[int]


class KvPiece(Struct, array_like=True, tag="q"):
    """prefill → decode: keys and values of tokens `first` to `end` of some layers, one after the other in the blob.

    It is a part of what tokens `start` to `stop` need; with `last` they have it all.
    """

    start: int
    stop: int
    layers: list[int]
    first: int
    end: int
    ref: BlobRef  # its dtype is that of the sender's cache
    last: bool = False


class Vectors(Struct, array_like=True, gc=False, tag="m"):
    """embedding: the vectors of the next `count` texts."""

    data: bytes  # float32, little-endian, one vector after the other
    count: int
    tokens: int  # of these texts


class Recording(Struct, array_like=True, gc=False, tag="h"):
    """asr: what a file is, once per stream. The language is "" where nobody speaks, or the model cannot tell."""

    duration: float  # seconds
    language: str  # code
    language_name: str


class Segment(Struct, array_like=True, omit_defaults=True, tag="g"):
    """asr: a stretch of text that is final. Times are seconds from the beginning of the recording."""

    id: int  # from 0
    window: int  # of the recording that it was heard in
    start: float
    end: float
    text: str  # with the space before it, where the language has spaces
    tokens: list[int] = []
    words: list[tuple[str, float, float]] = []  # (text, start, end)
    avg_logprob: float = 0.0
    no_speech_prob: float = 0.0
    temperature: float = 0.0
    compression_ratio: float = 0.0
    seek: float = 0.0  # where its window starts


class Partial(Struct, array_like=True, gc=False, tag="p"):
    """asr: what was understood so far. `stable` only grows from one to the next; `tail` may change."""

    stable: str
    tail: str


class Audio(Struct, array_like=True, omit_defaults=True, gc=False, tag="w"):
    """tts → anyone: the next PCM (mono, 16-bit little-endian, 24 kHz).

    `words` are those of the whole sentence as (written, start, end), in ms from the beginning of the stream: estimates
    with a sentence's first item, the true times with its last. A later list of the same `sentence` replaces one before.
    `text`: how many characters of the request are wholly spoken with this item; 0: no more than before.
    `usage`: with the last item of a sentence, what that sentence took: tokens of its text, and frames.
    """

    data: bytes
    words: list[tuple[str, int, int]] = []
    sentence: int = 0
    text: int = 0
    usage: Usage | None = None


class Stroke(Struct, array_like=True, omit_defaults=True, tag="k"):
    """diffusion: a step is done. One that the caller has no credit for is left out: only the newest tells anything."""

    step: int  # from 1
    steps: int
    preview: bytes = b""  # the estimate so far, a file in the request's format
    checkpoint: Checkpoint | None = None


class Picture(Struct, array_like=True, tag="z"):
    """diffusion: the picture is done: a file in the request's format, lent to the caller."""

    ref: BlobRef
    width: int
    height: int
    steps: int


class Wanted(Struct, array_like=True, tag="j"):
    """planner: how many instances of a group there should be, and why."""

    group: str
    role: str
    target: int
    ready: int
    starting: int
    reason: str
    demand: dict[str, float]  # instances that would just do, by what calls for them
    cold_start: float  # seconds, as measured; 0: not yet


Body = (
    Tokens
    | Text
    | Blob
    | Chunk
    | SpeechEdge
    | Verdict
    | Spoken
    | Voice
    | Seen
    | Held
    | KvPiece
    | Vectors
    | Recording
    | Segment
    | Partial
    | Audio
    | Stroke
    | Picture
    | Wanted
)


# ------------------------------------------------------------------------------------------------------------- frames
class Accepted(Struct, array_like=True, gc=False, tag="a"):
    """An instance took the stream; sent once per stream, before any item."""

    stream: int


class Item(Struct, array_like=True, gc=False, tag="i"):
    stream: int
    seq: int
    body: Body


class Beat(Struct, array_like=True, gc=False, tag="b"):
    """Nothing to say, still at work. `seq`: items sent so far."""

    stream: int
    seq: int


class End(Struct, array_like=True, omit_defaults=True, tag="e"):
    """The stream is complete. `status` is the finish reason; `timing` holds seconds by `<role>.<stage>`."""

    stream: int
    seq: int
    status: str = "stop"
    usage: Usage | None = None
    timing: dict[str, float] = {}


class Error(Struct, array_like=True, omit_defaults=True, gc=False, tag="!"):
    stream: int
    seq: int
    code: str
    message: str
    retryable: bool = False
    param: str | None = None


class Want(Struct, array_like=True, gc=False, tag="w"):
    """`total` feeds may be sent since the start; cumulative, and repeated when the caller tells where it is."""

    stream: int
    total: int


Frame = Accepted | Item | Beat | End | Error | Want


class Frames(Struct, array_like=True, tag="f"):
    """All frames of one step for one destination process. `sender` is the worker's instance id."""

    v: int
    sender: str
    frames: list[Frame]


# ----------------------------------------------------------------------------------------------------- opens, control
FOREVER = 2**40  # milliseconds: 34 years


class Open(Struct, kw_only=True, omit_defaults=True, tag="open"):
    """Start a stream. Carries its first credit, so that work starts at once. May arrive twice: `(caller, stream)`."""

    v: int
    caller: str  # instance id, "<role>-<hex>"
    stream: int
    credit: int  # items that may be sent before the first Credit
    body: (
        Chat
        | Draw
        | Complete
        | Generate
        | Prefill
        | Become
        | Cached
        | Encode
        | Profile
        | Detect
        | Judge
        | Survey
        | Voices
        | Transcribe
        | Listen
        | Speak
        | Embed
        | Targets
        | Echo
    )
    deadline_ms: int | None = None  # to be complete in; more than FOREVER is no more than that
    session: str = ""  # the realtime session that it is for, if it is part of a reply
    epoch: int = 0  # of that session: what is older than the newest is out of date, see `epochs`


class Credit(Struct, array_like=True, gc=False, tag="c"):
    """`total` items may be sent since the start; cumulative, so a lost grant is harmless."""

    stream: int
    total: int


class Cancel(Struct, array_like=True, gc=False, tag="x"):
    stream: int


class Controls(Struct, array_like=True, tag="k"):
    """Control of many streams of one caller at one instance. An empty list is a probe: the reply is `Pong`."""

    v: int
    caller: str
    controls: list[Credit | Cancel]


class Feed(Struct, array_like=True, gc=False, tag="u"):
    """The next bytes that a caller feeds into a stream; `seq` counts those with data from 0.

    Without data it tells how many were sent, and may be repeated. `last`: there will be no more.
    """

    stream: int
    seq: int
    data: bytes
    last: bool = False


class Feeds(Struct, array_like=True, tag="U"):
    """Feeds into many streams of one caller at one instance, on the connection for bulk: no cancel waits for them."""

    v: int
    caller: str
    feeds: list[Feed]


class Pong(Struct, array_like=True, gc=False, tag="p"):
    v: int
    instance: str
    state: str


# ------------------------------------------------------------------------------------------------------------- events
class ModelCard(Struct, omit_defaults=True, kw_only=True):
    """A model that an instance serves, as peers and `/v1/models` see it."""

    name: str
    context: int  # longest prompt plus output, tokens
    created: int = 0  # Unix seconds of the checkpoint
    tools: bool = False
    images: bool = False  # its chats may hold them
    vocab: int = 0
    voices: list[str] = []
    live: bool = False  # it hears while somebody speaks: `Listen`
    block_size: int = 0  # tokens of a block of its prefix cache; 0: it has none
    kv: str = ""  # engines of one model with the same can take each other's keys and values; empty: with nobody's
    parent: str = ""  # of an adapter, the model that it changes
    resident: bool = True  # an adapter that is not has to be loaded first
    root: int = 0  # what the chains of its blocks begin with (`prefixes`)


class Heartbeat(Struct, kw_only=True, omit_defaults=True, tag="heartbeat"):
    """Who is alive and how loaded. Sent every half second and on every change of state."""

    v: int
    role: str
    instance: str
    state: str  # starting | warming | ready | draining | stopped
    seq: int
    models: list[ModelCard] = []
    load: dict[str, float] = {}  # e.g. active, requests (since it began), queued, kv_free
    host: str = ""
    pid: int = 0


class CacheNews(Struct, array_like=True, gc=False, tag="cache"):
    """What a prefix cache has come to hold since the news before, and what it no longer holds (`prefixes`)."""

    v: int
    instance: str
    number: int  # from 0 on
    stored: list[int]
    dropped: list[int]


# What may come back for a request. Of one that is not here, anything.
ANSWERS: dict[type[Request], tuple[type[Struct], ...]] = {
    Chat: (Text,),
    Complete: (Text,),
    Generate: (Tokens,),
    Prefill: (KvPiece,),
    Cached: (Held,),
    Encode: (Seen,),
    Profile: (Chunk,),
    Detect: (SpeechEdge,),
    Judge: (Verdict,),
    Survey: (Spoken,),
    Voices: (Voice,),
    Transcribe: (Recording, Segment),
    Listen: (Partial, Segment),
    Speak: (Audio,),
    Embed: (Vectors,),
    Draw: (Stroke, Picture),
    Targets: (Wanted,),
}


T = TypeVar("T")


def _decoder(kind: type[T]) -> Callable[[bytes], T]:
    """Bytes to `kind`. All that can be wrong with them is a ValueError, nesting without end included."""
    decode = msgspec.msgpack.Decoder(kind).decode

    def checked(data: bytes) -> T:
        try:
            return decode(data)
        except RecursionError:
            raise msgspec.ValidationError("nested too deeply") from None

    return checked


_frames = msgspec.msgpack.Encoder()
encode = _frames.encode
decode_frames = _decoder(Frames)
decode_open = _decoder(Open)
decode_controls = _decoder(Controls)
decode_feeds = _decoder(Feeds)
decode_pong = _decoder(Pong)
decode_heartbeat = _decoder(Heartbeat)
decode_cache_news = _decoder(CacheNews)
