"""Define every struct of the wire protocol.

Messages are MessagePack. An Open is encoded as a *map*: fields may be added, and unknown fields are
ignored. Frames, controls and feeds are encoded as *arrays* with their tag first. One NATS message
carries many frames: an actor sends one `Frames` per step and destination process.

    caller  → worker   Open            on motet.v2.<role>.<op>  or  motet.v2.<role>.i.<instance>.open
    worker  → caller   Frames[…]       on motet.v2.inbox.<role>.<instance>.frames
    caller  → worker   Controls[…]     on motet.v2.<role>.i.<instance>.ctl
    caller  → worker   Feeds[…]        on motet.v2.<role>.i.<instance>.feed
    anyone  → anyone   Heartbeat       on motet.v2.ev.<role>.<instance>.heartbeat

A stream is named by its caller's instance id and a number that the caller never reuses. `seq`
counts the items of a stream from 0; every other frame carries the number of items sent so far, so
that the receiver detects a lost tail. The input that a caller feeds into a stream is counted and
granted in the same way, in the other direction. Deadlines are remaining milliseconds, never
wall-clock times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Struct

PROTOCOL = 2
# feeds that may be sent before the first FeedCredit, and the most a worker buffers for a slow reader
FEED_WINDOW = 64
FEED_SIZE = 32 * 1024  # maximum bytes of one feed
TEMPLATE_OPTIONS_SIZE = 4096  # maximum characters of `Chat.template_options`


# -------------------------------------------------------------------------------------- small parts
class BlobRef(Struct, frozen=True, omit_defaults=True):
    """Reference to bulk bytes that are transferred outside of messages.

    `address` depends on the transport: a shared-memory segment name, or host:port.
    """

    transport: Literal["shm", "tcp"]
    address: str
    key: str
    nbytes: int
    dtype: str = "uint8"
    shape: tuple[int, ...] = ()
    digest: str = ""  # BLAKE2b-128 of the bytes, hex; empty if not computed
    # host:port of the owner's TCP server, used if attaching to shared memory fails
    fallback: str = ""
    owner: str = ""  # instance id that holds the bytes


class Usage(Struct, omit_defaults=True, gc=False):
    """Token counts of a request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # part of prompt_tokens: served from a prefix cache
    image_tokens: int = 0  # part of prompt_tokens: image placeholders
    audio_tokens: int = 0  # part of prompt_tokens: placeholders of sound
    reasoning_tokens: int = 0  # part of completion_tokens
    accepted_tokens: int = 0  # part of completion_tokens: accepted draft tokens
    # draft tokens that verification rejected; not part of completion_tokens
    rejected_tokens: int = 0


class Sampling(Struct, omit_defaults=True, kw_only=True):
    """Sampling parameters of a request.

    Noise is keyed by (seed, position), so a stream continues identically after a failover.
    """

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # applies to prompt and output, as in transformers
    logit_bias: dict[int, float] = {}
    seed: int = 0
    logprobs: int = -1  # -1: none; 0: of the chosen token; n: also of the n most likely tokens
    prompt_logprobs: int = -1  # the same of the prompt's tokens, except the first
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    # names of fields above that the client left out: the tokenizer sets them as the model recommends
    left_out: list[str] = []


class Grammar(Struct, omit_defaults=True, kw_only=True):
    """Grammar that constrains a reply.

    Tokens that the grammar does not allow are masked; the reply ends where the grammar ends.
    """

    kind: Literal["json_schema", "regex", "choice", "grammar"]
    # JSON schema, regular expression, JSON list of choices, or a grammar in Lark's or llama.cpp's
    # (GBNF) syntax
    text: str
    param: str = ""  # path of the field in the client's request, for error messages
    # What precedes the text that the grammar constrains, such as the model's reasoning: a grammar in
    # Lark's syntax whose rule `start` refers to that text as `@answer`; empty: nothing does
    frame: str = ""


class TokenLogprob(Struct, array_like=True, gc=False):
    """Log-probability of one output token, with the most likely alternatives as (id, logprob)."""

    id: int
    logprob: float
    top: list[tuple[int, float]] = []  # most likely first


class ScoredToken(Struct, array_like=True, gc=False):
    """Log-probability of one prompt token, its rank from 1, and the most likely alternatives."""

    id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = []  # most likely first


class PromptLogprob(Struct, array_like=True, gc=False):
    """Log-probability of one prompt token for clients, with the bytes that tokens encode."""

    token: bytes
    logprob: float | None  # None for the first token
    rank: int = 0
    top: list[tuple[int, bytes, float]] = []


class ToolCallDelta(Struct, array_like=True, omit_defaults=True, gc=False):
    """Fragment of a tool call.

    The first fragment of an index carries `id` and `name`; the `arguments` fragments concatenate to
    JSON.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class TextLogprob(Struct, array_like=True, gc=False):
    """Log-probability of one emitted token, with the bytes that the token encodes."""

    token: bytes
    logprob: float
    top: list[tuple[bytes, float]] = []


class Image(Struct, omit_defaults=True, kw_only=True):
    """Image, video or sound in a chat: a file in any supported format, and its maximum resolution."""

    file: BlobRef
    is_video: bool = False
    is_audio: bool = False
    max_pixels: int = 0  # approximate pixel count to scale down to; 0: the model's maximum
    param: str = ""  # path of the field in the client's request, for error messages


class ImageEmbeddingRef(Struct, omit_defaults=True, kw_only=True):
    """Image embeddings of one picture: one vector per placeholder token in the prompt."""

    # float32 [layers, tokens, hidden]: the first layer replaces token embeddings, further layers
    # are added to deeper hidden states
    embeddings: BlobRef
    name: str  # key of the content: equal names mean equal embeddings
    # (frames, rows, columns) of the tokens, for models with multi-axis positions (M-RoPE)
    grid: tuple[int, ...] = ()
    interval: float = 1.0  # distance between consecutive frames, in positions


class StateRef(Struct, omit_defaults=True, kw_only=True):
    """Hidden states of consecutive tokens of a sequence, for the next stage of a model.

    A state is the sum of a token's input embedding, which placeholders lack, and of its last hidden
    state.
    """

    states: BlobRef  # float32 [tokens, hidden]
    start: int = 0  # position of the first token
    # int32 [3, tokens]: rotary positions, where they are not `start` and the next ones
    positions: bytes = b""


class Resume(Struct, omit_defaults=True):
    """State of a broken text stream at the client, to resume it at another instance.

    Replaying `ids` restores all text state; `text_len` verifies it.
    """

    ids: list[int]
    text_len: int  # characters of reasoning, content and tool-call arguments together


# ----------------------------------------------------------------------------------------- requests
class Request(Struct, kw_only=True, omit_defaults=True):
    """Base of all request bodies of an Open. The tag is the operation's name in the subject."""


class Chat(Request, tag="chat"):
    """Request a chat completion (gateway → tokenizer); `Text` items come back.

    Messages have OpenAI's shape, with `reasoning_content` beside `content`; replies hold reasoning,
    text and tool calls. A content part {"type": "image"} or
    {"type": "audio"} stands for the next element of `images`.
    """

    model: str
    messages: list[dict[str, Any]]
    sampling: Sampling
    images: list[Image] = []
    tools: list[dict[str, Any]] = []
    tool_choice: str = "auto"  # "auto" | "none" | "required"
    tool: str = ""  # name of the tool to call if tool_choice is "required"; empty: any tool
    parallel_tools: bool = True  # allow several tool calls in one reply
    add_generation_prompt: bool = True  # the prompt ends with the head of the assistant's turn
    continue_final_message: bool = False  # the reply continues the last message
    grammar: Grammar | None = None  # constrains a reply without tool calls, behind its reasoning
    reasoning_effort: str = ""  # none, minimal, low, medium, high or xhigh; empty: the model's
    template_options: dict[str, Any] = {}  # variables of the chat template, by name
    return_prompt: bool = False  # send the ids of the prompt, as the first item
    return_states: bool = False  # send `States` for the next stage of an omni model
    stop: list[str] = []
    max_tokens: int | None = None  # None: limited by the context only
    resume: Resume | None = None
    request_id: str = ""
    priority: int = 0
    tenant: str = ""
    max_context: int = 0  # limit on prompt plus reply, tokens; 0: the model's limit
    target: str = ""  # the only target of the model's chain that may serve it; empty: any


class Complete(Request, tag="complete"):
    """Request a completion of a raw prompt, text or token ids (gateway → tokenizer).

    `Text` items come back; before them, `PromptPiece` items if ids or scores are requested.
    """

    model: str
    prompt: str | list[int]
    sampling: Sampling
    grammar: Grammar | None = None
    echo: bool = False  # begin the text with the prompt
    suffix: str = ""  # text behind the gap that the completion fills
    return_prompt: bool = False  # send the ids of the prompt, as the first item
    stop: list[str] = []
    max_tokens: int | None = 16
    resume: Resume | None = None
    request_id: str = ""
    priority: int = 0
    tenant: str = ""
    max_context: int = 0  # limit on prompt plus reply, tokens; 0: the model's limit
    target: str = ""  # the only target of the model's chain that may serve it; empty: any


TIERS = {"flex": -1, "default": 0, "priority": 1}  # priority of each service tier
BACKGROUND = -2  # priority of batches, which use what other requests leave


def tier_of(priority: int) -> str:
    """Return the highest service tier whose priority is at most `priority`, else "flex"."""
    return max(
        (name for name in TIERS if TIERS[name] <= priority), key=TIERS.__getitem__, default="flex"
    )


class Tokenize(Request, tag="tokenize"):
    """Request the token ids of a prompt, as it would be generated from (gateway → tokenizer).

    `TokenIds` items come back, none with `count_only`; `Usage.prompt_tokens` of the end counts them.
    """

    prompt: Chat | Complete
    count_only: bool = False
    special_tokens: bool = True  # a raw text begins with the model's beginning-of-text token
    pieces: bool = False  # also return the text of each token


class Detokenize(Request, tag="detokenize"):
    """Request the text of token ids, special tokens included (gateway → tokenizer).

    `Text` items come back.
    """

    model: str
    ids: list[int]
    request_id: str = ""
    tenant: str = ""


class Generate(Request, tag="generate"):
    """Request token generation (tokenizer, tts → decode): token ids in, `Tokens` items back.

    `output` holds tokens that were emitted before a failover. The placeholders in the prompt belong
    to `image_embeddings`, in order. Where a talker's frames have several codes, a token is all of
    them, here and in `Tokens`, one after the other.
    """

    model: str
    prompt: list[int]
    sampling: Sampling
    output: list[int] = []
    grammar: Grammar | None = None  # `output` is a prefix of the reply that it constrains
    image_embeddings: list[ImageEmbeddingRef] = []
    return_states: bool = False  # send the states of prompt and reply with the tokens
    # states of another model for the prompt and, as far as they are known, for the reply; those that
    # follow are fed as float32, and the last one serves for all further tokens
    input_states: StateRef | None = None
    # so many tokens of the prompt have their state in place of an embedding, to later ones it is added
    replaced: int = 0
    # the chat that the prompt was made of, for instances whose card says `takes_chats`; one with
    # pictures also for those that say `takes_images`, whose prompt has one mark per picture
    chat: Chat | None = None
    request_id: str = ""
    priority: int = 0  # requests with higher priority run first
    # tenant for fair shares; the part before a NUL names the tenant group that shares one share
    tenant: str = ""


class Prefill(Request, tag="prefill"):
    """Request a remote prefill (decode → prefill); `KvChunk` items come back while it is computed.

    The caller already has the tokens before `start`. The blobs are kept until the caller ends its
    input, which signals that it has read them all.
    """

    model: str
    prompt: list[int]
    kv_format: str  # the caller's `ModelCard.kv_format`
    start: int = 0
    request_id: str = ""
    priority: int = 0
    tenant: str = ""


class SwitchRole(Request, tag="switch_role"):
    """Switch an instance between the decode and prefill roles (operator → decode, prefill).

    The switch happens once all running requests are complete.
    """

    role: str


class ListBlocks(Request, tag="list_blocks"):
    """Request the contents of the prefix cache (tokenizer → decode); `CachedBlocks` items come back."""


class Encode(Request, tag="encode"):
    """Request the embeddings of an image (anyone → encoder); one `EncodedImage` comes back."""

    model: str
    image: Image
    request_id: str = ""


class Profile(Request, tag="profile"):
    """Record the engine's next steps (operator → decode).

    A gzipped Chrome trace (JSON) comes back as `Chunk` items. Recording ends after `steps` steps or
    `seconds` seconds, whichever comes first; with steps=0 only `seconds` counts.
    """

    model: str
    steps: int = 20
    seconds: float = 60.0
    shapes: bool = False  # record input shapes of each operator
    stacks: bool = False  # record Python stacks per operator; slows steps down several times
    memory: bool = False  # record memory allocated and freed per operator


class Detect(Request, tag="detect"):
    """Request voice activity detection of a live stream (anyone → vad).

    PCM is fed as the stream's input; `SpeechEdge` items come back. The fields are those of
    `server_vad` in OpenAI's realtime API.
    """

    model: str = ""  # empty: the model that is served
    sample_rate: int = 24000
    threshold: float = 0.5
    prefix_padding_ms: int = 300
    silence_duration_ms: int = 500
    idle_timeout_ms: int | None = None
    # silence within a turn that is reported as a pause, ms; also enables `heard` reports
    pause_ms: int | None = None


class PredictTurnEnd(Request, tag="predict_turn_end"):
    """Request the probability that the speaker has finished (anyone → vad).

    One `TurnEnd` comes back.
    """

    text: str  # transcript of the turn so far
    model: str = ""  # empty: the model that is served


class FindSpeech(Request, tag="find_speech"):
    """Request the speech spans of an audio file (anyone → vad); one `SpeechSpans` comes back.

    The file may be in any supported format. The other fields are as in `Detect`.
    """

    audio: BlobRef
    model: str = ""  # empty: the model that is served
    threshold: float = 0.5
    prefix_padding_ms: int = 0
    silence_duration_ms: int = 100
    request_id: str = ""


class EmbedSpeakers(Request, tag="embed_speakers"):
    """Request speaker embeddings of spans of an audio file (anyone → speakers).

    The file may be in any supported format. One `SpeakerEmbedding` per span comes back, in order.
    """

    audio: BlobRef
    # (start, end) in seconds, sorted by start; empty: the whole file as one span
    spans: list[tuple[float, float]] = []
    model: str = ""  # empty: the model that is served
    request_id: str = ""


class TranscriptionResume(Struct, omit_defaults=True):
    """Position of a client in a broken transcription: its first incomplete window."""

    window: int
    segment: int  # id of the first segment of that window
    skip: int  # segments of that window that the client already has
    language: str = ""  # language that was detected


class Transcribe(Request, tag="transcribe"):
    """Request a transcription of an audio file in any supported format (anyone → asr).

    A `Recording` comes back, then `Segment` items as each becomes final.
    """

    model: str
    audio: BlobRef
    language: str = ""  # code or name; empty: detect
    task: Literal["transcribe", "translate"] = "transcribe"  # translate: into English
    prompt: str = ""  # preceding text, which also sets the spelling and style
    temperature: float = 0.0  # 0: greedy, with fallback to higher temperatures if decoding fails
    words: bool = False
    logprobs: bool = False
    seed: int = 0
    # (start, end) of speech in seconds; None: estimated from the sound level
    speech: list[tuple[float, float]] | None = None
    resume: TranscriptionResume | None = None
    request_id: str = ""


class Listen(Request, tag="listen"):
    """Request a live transcription (anyone → asr).

    PCM is fed as the stream's input; `Partial` items come back, and one `Segment` at the end.
    """

    model: str
    sample_rate: int = 24000
    language: str = ""
    prompt: str = ""
    words: bool = False
    request_id: str = ""


class SpeechResume(Struct, omit_defaults=True):
    """Position of a client in a broken speech stream: characters of text and samples of sound."""

    text: int  # characters that are completely spoken, up to a sentence end: `Audio.text`
    samples: int  # samples that those characters took
    skip: int = 0  # samples of the following sentence that the client already has


class VoiceSample(Struct, omit_defaults=True):
    """Recording whose voice speech is to have, for models whose card has `clones`."""

    audio: BlobRef  # PCM, mono, 16 bits, 24 kHz
    words: str  # what is said in it


class Speak(Request, tag="speak"):
    """Request speech synthesis (anyone → tts): text in, `Audio` items back.

    Noise is keyed by (seed, sentence), so that a stream continues identically after a failover.
    """

    model: str
    text: str
    voice: str = ""  # empty: the model's first voice
    sample: VoiceSample | None = None  # a voice of the tenant's own, instead
    instructions: str = ""  # how it is spoken, for models whose card has `instructions`
    speed: float = 1.0  # 0.25 to 4; the pitch stays the same
    seed: int = 0
    # number of the first sentence; above 0 if earlier sentences are spoken by another request
    sentence: int = 0
    resume: SpeechResume | None = None
    request_id: str = ""
    priority: int = 0  # sentences of a lower one wait for those of a higher one


class SpeakStates(Request, tag="speak_states"):
    """Request the speech of a reply from the states of its model (anyone → tts); `Audio` items back.

    The input is fed: a `States` item in MessagePack per feed, the reader releases its blob. The speech
    begins with the states of the reply's first token, and ends after those of its last. With `skip`,
    samples that the caller has are left out.
    """

    model: str
    voice: str = ""  # empty: the model's first voice
    seed: int = 0
    skip: int = 0  # samples that the caller already has
    request_id: str = ""
    priority: int = 0
    tenant: str = ""


class Embed(Request, tag="embed"):
    """Request embeddings of texts or of token ids, and of pictures (anyone → embedding).

    `Vectors` come back, those of the input first, in order.
    """

    model: str
    input: list[str | list[int]]  # either all texts or all token ids
    pictures: list[Image] = []  # for models that embed texts and pictures alike
    # name of the prompt that precedes each text; empty: the model's default, if any
    prompt: str = ""
    # truncate each vector to so many numbers and normalise it to unit length; 0: all
    dimensions: int = 0
    # number of the first text, for errors; above 0 if earlier texts are embedded by another request
    first: int = 0
    request_id: str = ""
    priority: int = 0  # texts of a lower one wait for those of a higher one


class Rank(Request, tag="rank"):
    """Request scores of documents against queries (anyone → ranking); `Scores` come back, in order.

    There is one query for all documents, or one for each.
    """

    model: str
    queries: list[str]
    documents: list[str]
    # cut each document to so many tokens; 0: longer ones than the model takes are refused
    max_document: int = 0
    # number of the first document, for errors; above 0 if earlier ones are scored by another request
    first: int = 0
    priority: int = 0  # documents of a lower one wait for those of a higher one
    request_id: str = ""


class Checkpoint(Struct, omit_defaults=True):
    """Checkpoint of a denoise loop as safetensors, inline if small.

    Any instance of the model can resume from it.
    """

    step: int  # completed steps
    data: bytes = b""
    ref: BlobRef | None = None


class Adapter(Struct, array_like=True, gc=False):
    """LoRA adapter of a diffusion model, by its name on the server, with its scale."""

    name: str
    scale: float = 1.0


class Control(Struct, array_like=True, gc=False):
    """ControlNet of a diffusion model, by its name on the server, with the image that it follows.

    `start` and `end`: the part of the steps, 0 to 1, in which it takes part.
    """

    name: str
    image: BlobRef | None = None
    scale: float = 1.0
    start: float = 0.0
    end: float = 1.0


class ImagePrompt(Struct, array_like=True, gc=False):
    """IP-Adapter of a diffusion model, by its name on the server, with the image that it reads."""

    name: str
    image: BlobRef | None = None
    scale: float = 1.0


VideoForm = Literal["mp4", "webm"]
VIDEO_FORMS: tuple[VideoForm, ...] = get_args(VideoForm)


class Draw(Request, tag="draw"):
    """Request an image or a video (anyone → diffusion): `DenoisingProgress` items, one `Picture` at the end.

    The noise depends on `seed` alone. Zero (None for the scales) stands for the model's default.
    With `image`, that image is edited; with `mask` (an image of the same size) only where the mask
    is white. A video is a request in the format mp4 or webm, and begins with `image`.
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
    strength: float | None = None  # strength of the change to `image`, 0 to 1
    previews: int = 0  # number of previews, spread evenly over the steps
    checkpoint_every: int = 0  # steps; 0: no checkpoints
    loras: list[Adapter] = []
    scheduler: str = ""  # by name; empty: the model's own
    controls: list[Control] = []
    image_prompts: list[ImagePrompt] = []
    format: Literal["png", "jpeg", "webp", "mp4", "webm"] = "png"
    quality: int = 90  # quality of jpeg and webp, 1 to 100
    seconds: float = 0.0  # length of a video; 0: the model's default
    resume: Checkpoint | None = None
    request_id: str = ""


class ListTargets(Request, tag="list_targets"):
    """Request the planner's target instance counts (operator → planner).

    One `ScalingTarget` per group comes back.
    """


class Echo(Request, tag="echo"):
    """Request `count` echo items, `delay_ms` apart, from any actor that serves it (e.g. tests)."""

    count: int = 1
    delay_ms: float = 0.0
    text: str = ""
    fail_at: int = -1  # raise before this item; -1: never


# ---------------------------------------------------------------------------------- bodies of items
class Tokens(Struct, array_like=True, omit_defaults=True, gc=False, tag="t"):
    """Tokens of one engine step (decode → tokenizer): one, or several with speculation.

    logprobs: one per token; where the prompt is scored, one more for the stop token, whose id is
    not sent.
    """

    ids: list[int]
    logprobs: list[TokenLogprob] | None = None


class CountedTokens(Tokens, array_like=True, omit_defaults=True, gc=False, tag="C", kw_only=True):
    """Tokens of an engine that read the pictures itself, with the tokens of the prompt they made."""

    prompt_tokens: int


class StatedTokens(Tokens, array_like=True, omit_defaults=True, tag="S", kw_only=True):
    """Tokens with the states of those that were computed for them (decode → tokenizer).

    There are no tokens while a prompt is computed in parts. After a move, states come again from the
    beginning.
    """

    states: StateRef


class PromptScores(Struct, array_like=True, gc=False, tag="u"):
    """Log-probabilities of prompt tokens from position `start` on (decode → tokenizer).

    They come in order, before the first `Tokens`, and again from the beginning after a move.
    """

    start: int
    tokens: list[ScoredToken]


class PromptPiece(Struct, array_like=True, omit_defaults=True, gc=False, tag="c"):
    """Part of the prompt (tokenizer → gateway), before the first `Text`.

    Without log-probabilities it is the whole prompt. Parts with log-probabilities begin at the same
    positions in every attempt, so that a repeated one is known by `start`.
    """

    start: int  # position of its first token
    ids: list[int]
    logprobs: list[PromptLogprob] | None = None


class Text(Struct, array_like=True, omit_defaults=True, gc=False, tag="x"):
    """Text that is safe to show (tokenizer → gateway), and the token ids that it was decoded from.

    `ids` may run ahead of `text`: incomplete characters and possible stop strings or tags are held
    back.
    """

    text: str
    ids: list[int]
    tools: list[ToolCallDelta] | None = None
    logprobs: list[TextLogprob] | None = None
    prompt_tokens: int = 0  # of the request; sent once, with the first text of a stream
    reasoning: str = ""  # text of the model's reasoning, which precedes `text`


class TargetText(Text, array_like=True, omit_defaults=True, gc=False, tag="X", kw_only=True):
    """Text from another target than the text before it.

    `target` generates from here on, by `ModelCard.target`.
    """

    target: str


class States(Struct, array_like=True, omit_defaults=True, tag="H"):
    """States of the next tokens of prompt and reply (tokenizer → gateway), if they are requested.

    They may come again from an earlier token on, after a move.
    """

    ref: StateRef
    prompt_tokens: int  # of the request: states from there on are of the reply


class TokenIds(Struct, array_like=True, omit_defaults=True, gc=False, tag="T"):
    """Next token ids of a prompt; `pieces` is the text of each, if it was requested."""

    ids: list[int]
    pieces: list[str] = []


class Blob(Struct, array_like=True, tag="r"):
    """Item that consists of one blob."""

    ref: BlobRef


class Chunk(Struct, array_like=True, gc=False, tag="d"):
    """Next bytes of a file that is sent in order; small enough for any `max_payload`."""

    data: bytes


class TurnEnd(Struct, array_like=True, gc=False, tag="v"):
    """Probability that a text is a finished turn, from the VAD service."""

    probability: float


class SpeechEdge(Struct, array_like=True, gc=False, tag="s"):
    """Start or stop of speech, or an idle timeout without speech, from the VAD service.

    All times are milliseconds of audio since the start of the stream. With `pause_ms`, `pause` and
    `resume` mark silences within a turn, and `heard` reports how far the turn was heard and until
    where there was speech (`speech_ms`).
    """

    kind: Literal["start", "stop", "idle", "pause", "resume", "heard"]
    ms: int  # as in OpenAI's realtime API: includes the prefix padding and the awaited silence
    speech_ms: int  # where the speech itself starts or ends; for "idle": where the silence began
    heard_ms: int  # audio received when the edge was detected


class SpeechSpans(Struct, array_like=True, gc=False, tag="o"):
    """Speech spans of a recording, in order and disjoint, from the VAD service."""

    spans: list[tuple[float, float]]  # seconds
    duration: float  # of the recording, seconds


class SpeakerEmbedding(Struct, array_like=True, gc=False, tag="n"):
    """Speaker embedding of a span of a recording, to be compared by cosine similarity."""

    vector: bytes  # float32, little-endian, of unit length
    # cosine similarity above which two vectors more likely belong to one speaker than to two
    threshold: float


class EncodedImage(Struct, array_like=True, tag="l"):
    """Image embeddings of a picture (encoder → caller), and its token ids in a prompt."""

    embedding: ImageEmbeddingRef
    ids: list[int]  # placeholder tokens and the separator tokens between them


class CachedBlocks(Struct, array_like=True, gc=False, tag="y"):
    """Some blocks of the prefix cache (`prefixes`), as of the CacheUpdate before `number`."""

    number: int
    blocks: list[int]


class KvChunk(Struct, array_like=True, tag="q"):
    """Keys and values of tokens `first` to `end` of some layers (prefill → decode).

    The layers are stored one after the other in the blob. It is a part of the transfer of tokens
    `start` to `stop`; `last` marks that transfer's final piece.
    """

    start: int
    stop: int
    layers: list[int]
    first: int
    end: int
    ref: BlobRef  # its dtype is that of the sender's KV cache
    last: bool = False


class Vectors(Struct, array_like=True, gc=False, tag="m"):
    """Embeddings of the next `count` texts, from the embedding service.

    A text with a vector for each token may come in several items; all but its last have count 0.
    """

    data: bytes  # float32, little-endian, vectors concatenated
    count: int
    tokens: int  # tokens of these texts
    size: int = 0  # numbers of a vector of a text with several; 0: each text has one vector


class Scores(Struct, array_like=True, tag="M"):
    """Scores of the next documents, from the ranking service."""

    values: list[float]
    tokens: int  # tokens that were read for them


class Recording(Struct, array_like=True, gc=False, tag="h"):
    """Properties of an audio file, sent once per transcription stream.

    The language is "" if there is no speech, or if the model cannot detect it.
    """

    duration: float  # seconds
    language: str  # code
    language_name: str


class Segment(Struct, array_like=True, omit_defaults=True, tag="g"):
    """Final segment of a transcription. Times are seconds from the beginning of the recording."""

    id: int  # from 0
    window: int  # window of the recording that it was decoded in
    start: float
    end: float
    text: str  # with its leading space, in languages with spaces
    tokens: list[int] = []
    words: list[tuple[str, float, float]] = []  # (text, start, end)
    avg_logprob: float = 0.0
    no_speech_prob: float = 0.0
    temperature: float = 0.0
    compression_ratio: float = 0.0
    seek: float = 0.0  # start of its window
    logprobs: list[tuple[str, float]] = []  # (text, log-probability) of its tokens, if requested


class Partial(Struct, array_like=True, gc=False, tag="p"):
    """Transcription so far. `stable` only grows from one item to the next; `tail` may change."""

    stable: str
    tail: str


class Audio(Struct, array_like=True, omit_defaults=True, gc=False, tag="w"):
    """Next PCM of a speech stream (mono, 16-bit little-endian, 24 kHz).

    `words` are those of the whole sentence as (written, start, end), in ms from the beginning of
    the stream: estimates with a sentence's first item, exact times with its last. A later list for
    the same `sentence` replaces the earlier one. `text` is the number of characters of the request
    that are completely spoken with this item; 0: unchanged. `usage` comes with the last item of a
    sentence: the tokens of its text and its frames.
    """

    data: bytes
    words: list[tuple[str, int, int]] = []
    sentence: int = 0
    text: int = 0
    usage: Usage | None = None


class DenoisingProgress(Struct, array_like=True, omit_defaults=True, tag="k"):
    """Completion of a denoising step, from the diffusion service.

    Strokes that the caller has no credit for are dropped, since only the newest matters.
    """

    step: int  # from 1
    steps: int
    preview: bytes = b""  # preview of the result, a file in the request's format; webp of a video
    checkpoint: Checkpoint | None = None


class Picture(Struct, array_like=True, tag="z"):
    """Finished image or video, a file in the request's format that is leased to the caller."""

    ref: BlobRef
    width: int
    height: int
    steps: int
    frames: int = 1
    frame_rate: float = 0.0  # frames per second; 0: an image


class ScalingTarget(Struct, array_like=True, tag="j"):
    """Target number of instances of a group, with its reason, from the planner."""

    group: str
    role: str
    target: int
    ready: int
    starting: int
    reason: str
    demand: dict[str, float]  # instances that each source of demand requires, by its name
    cold_start: float  # seconds, measured; 0: not measured yet


Body = (
    Tokens
    | CountedTokens
    | StatedTokens
    | States
    | PromptScores
    | PromptPiece
    | TargetText
    | Text
    | TokenIds
    | Blob
    | Chunk
    | SpeechEdge
    | TurnEnd
    | SpeechSpans
    | SpeakerEmbedding
    | EncodedImage
    | CachedBlocks
    | KvChunk
    | Vectors
    | Scores
    | Recording
    | Segment
    | Partial
    | Audio
    | DenoisingProgress
    | Picture
    | ScalingTarget
)


# ------------------------------------------------------------------------------------------- frames
class Accepted(Struct, array_like=True, gc=False, tag="a"):
    """Acceptance of a stream by an instance; sent once per stream, before any item."""

    stream: int


class Item(Struct, array_like=True, gc=False, tag="i"):
    """One item of a stream, numbered from 0."""

    stream: int
    seq: int
    body: Body


class Keepalive(Struct, array_like=True, gc=False, tag="b"):
    """Sign of life of a stream without new items. `seq`: items sent so far."""

    stream: int
    seq: int


class End(Struct, array_like=True, omit_defaults=True, tag="e"):
    """Normal end of a stream.

    `status` is the finish reason; `timing` holds seconds by `<role>.<stage>`; `stop` is the stop
    string that ended the text, if one did.
    """

    stream: int
    seq: int
    status: str = "stop"
    usage: Usage | None = None
    timing: dict[str, float] = {}
    stop: str = ""


class Error(Struct, array_like=True, omit_defaults=True, gc=False, tag="!"):
    """End of a stream with an error."""

    stream: int
    seq: int
    code: str
    message: str
    retryable: bool = False
    param: str | None = None


class FeedCredit(Struct, array_like=True, gc=False, tag="w"):
    """Grant of input: `total` feeds may be sent, counted from the start of the stream.

    The count is cumulative, and the grant is repeated when the caller reports its position.
    """

    stream: int
    total: int


Frame = Accepted | Item | Keepalive | End | Error | FeedCredit


class Frames(Struct, array_like=True, tag="f"):
    """All frames of one step for one destination process. `sender` is the worker's instance id."""

    v: int
    sender: str
    frames: list[Frame]


# ----------------------------------------------------------------------------------- opens, control
FOREVER = 2**40  # milliseconds: 34 years


class Open(Struct, kw_only=True, omit_defaults=True, tag="open"):
    """Request to start a stream, with its first credit, so that work starts at once.

    An Open may arrive twice; it is identified by `(caller, stream)`.
    """

    v: int
    caller: str  # instance id, "<role>-<hex>"
    stream: int
    credit: int  # items that may be sent before the first Credit
    body: (
        Chat
        | Draw
        | Complete
        | Tokenize
        | Detokenize
        | Generate
        | Prefill
        | SwitchRole
        | ListBlocks
        | Encode
        | Profile
        | Detect
        | PredictTurnEnd
        | FindSpeech
        | EmbedSpeakers
        | Transcribe
        | Listen
        | Speak
        | SpeakStates
        | Embed
        | Rank
        | ListTargets
        | Echo
    )
    deadline_ms: int | None = None  # remaining time until completion; capped at FOREVER
    session: str = ""  # realtime session, if the work is part of one of its replies
    epoch: int = 0  # epoch of that session; work of an older epoch is out of date, see `epochs`
    sites: tuple[str, ...] = ()  # where it may be done, further stages too; empty: anywhere


class Credit(Struct, array_like=True, gc=False, tag="c"):
    """Grant of items: `total` items may be sent, counted from the start of the stream.

    The count is cumulative, so a lost grant is harmless.
    """

    stream: int
    total: int


class Cancel(Struct, array_like=True, gc=False, tag="x"):
    """Request to end a stream."""

    stream: int


class Controls(Struct, array_like=True, tag="k"):
    """Controls of many streams of one caller at one instance.

    An empty list is a probe: the reply is `Pong`.
    """

    v: int
    caller: str
    controls: list[Credit | Cancel]


class Feed(Struct, array_like=True, gc=False, tag="u"):
    """Next input bytes of a stream; `seq` counts the feeds with data from 0.

    A feed without data reports how many were sent, and may be repeated. `last`: the input ends.
    """

    stream: int
    seq: int
    data: bytes
    last: bool = False


class Feeds(Struct, array_like=True, tag="U"):
    """Feeds of many streams of one caller to one instance.

    They use the connection for bulk data, so that they never delay a cancel.
    """

    v: int
    caller: str
    feeds: list[Feed]


class Pong(Struct, array_like=True, gc=False, tag="p"):
    """Reply to a probe: the instance and its state."""

    v: int
    instance: str
    state: str


# ------------------------------------------------------------------------------------------- events
class ModelCard(Struct, omit_defaults=True, kw_only=True):
    """Model that an instance serves, as announced to peers and `/v1/models`."""

    name: str
    context: int  # maximum prompt plus output, tokens
    created: int = 0  # Unix seconds of the checkpoint
    chat: bool = True  # False: it has no chat template, and completes raw prompts only
    tools: bool = False
    reasoning: bool = False  # replies may hold reasoning apart from their text
    reasoning_switch: bool = False  # reasoning can be switched off: `Chat.reasoning_effort`
    images: bool = False  # chats may contain images, or these can be embedded
    videos: bool = False  # it makes videos, not images
    multi_vector: bool = False  # embeddings have a vector for each token
    audio: bool = False  # chats may contain sound
    sampling: dict[str, float] = {}  # recommended values by field of `Sampling`
    vocab_size: int = 0
    longest_token: int = 0  # characters of the longest token; 0: unknown
    voices: list[str] = []
    answers: bool = False  # it speaks the replies of the chat model of its name: `SpeakStates`
    clones: bool = False  # speech can have the voice of a recording: `Speak.sample`
    instructions: bool = False  # speech follows a description: `Speak.instructions`
    live: bool = False  # supports live transcription: `Listen`
    accepts_prompt: bool = False  # transcription accepts a preceding text: `Transcribe.prompt`
    block_size: int = 0  # tokens per block of its prefix cache; 0: no prefix cache
    # format of keys and values; engines of one model with equal values can exchange keys and values; empty: no
    # exchange
    kv_format: str = ""
    parent: str = ""  # base model of an adapter
    resident: bool = True  # False: an adapter that must be loaded first
    problem: str = ""  # why an adapter cannot be served
    takes_chats: bool = False  # the engine is sent chats: `Generate.chat`
    hash_root: int = 0  # initial value of its block hash chains (`prefixes`)
    target: str = ""  # name of the target that the instance belongs to, in the model's chain
    rank: int = 0  # place of the target in the chain; those with a lower one are tried first
    refuses_images: bool = False  # of decode: its chats contain no images
    takes_images: bool = False  # of decode: it reads the images itself, from `Generate.chat`
    infill: bool = False  # plain completions may have a `suffix`
    family: str = ""  # `model_type` of its config.json
    parameters: int = 0  # numbers in its weights; 0: unknown
    weights: int = 0  # bytes of its weights on disk; 0: unknown


class Offer(Struct, omit_defaults=True, kw_only=True):
    """Model that a supervisor loads on demand: where it stands; requests for it wait.

    stage: absent, queued (others are loaded first), clearing (another one leaves), loading, ready,
    leaving or failed.
    """

    role: str
    model: str
    stage: str = "absent"
    share: float = 0.0  # of its loading, 0 to 1, estimated
    seconds: float = 0.0  # estimated, until it is ready
    problem: str = ""  # why its last start failed
    stay: float = -1.0  # seconds until it is unloaded if no request comes; -1: it stays
    videos: bool = False  # of diffusion: it makes videos, not pictures


class Heartbeat(Struct, kw_only=True, omit_defaults=True, tag="heartbeat"):
    """State and load of an instance, sent on every change of state and every `every` seconds."""

    v: int
    role: str
    instance: str
    state: str  # starting | prepared | warming | ready | draining | stopped
    seq: int
    models: list[ModelCard] = []
    load: dict[str, float] = {}  # e.g. active, requests (since its start), queued, kv_free
    offers: list[Offer] = []  # of a supervisor
    host: str = ""
    site: str = ""
    every: float = 0.5
    pid: int = 0
    start: float = 0.0  # seconds from process start until ready; 0: not measured


class CacheUpdate(Struct, array_like=True, gc=False, tag="cache"):
    """Blocks that a prefix cache stored and dropped since its previous news (`prefixes`)."""

    v: int
    instance: str
    number: int  # sequence number, from 0
    stored: list[int]
    dropped: list[int]


# Item types that may answer a request. Requests that are not listed accept any item.
ANSWERS: dict[type[Request], tuple[type[Struct], ...]] = {
    Chat: (Text, TargetText, PromptPiece, States),
    Complete: (Text, TargetText, PromptPiece),
    Tokenize: (TokenIds,),
    Detokenize: (Text,),
    Generate: (Tokens, CountedTokens, StatedTokens, PromptScores),
    Prefill: (KvChunk,),
    ListBlocks: (CachedBlocks,),
    Encode: (EncodedImage,),
    Profile: (Chunk,),
    Detect: (SpeechEdge,),
    PredictTurnEnd: (TurnEnd,),
    FindSpeech: (SpeechSpans,),
    EmbedSpeakers: (SpeakerEmbedding,),
    Transcribe: (Recording, Segment),
    Listen: (Partial, Segment),
    Speak: (Audio,),
    SpeakStates: (Audio,),
    Embed: (Vectors,),
    Rank: (Scores,),
    Draw: (DenoisingProgress, Picture),
    ListTargets: (ScalingTarget,),
}


T = TypeVar("T")


def _decoder(kind: type[T]) -> Callable[[bytes], T]:
    """Return a decoder of bytes to `kind`.

    It raises ValueError for any malformed input, including excessive nesting.
    """
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
decode_cache_update = _decoder(CacheUpdate)
